"""Request a plan and act on each step as soon as it is whole.

python docs/examples/plan.py tcp://127.0.0.1:5571 "Bring the cup to the table."
"""

import sys

from thor_dflash.serving.client import Chunk, PlanError, PlanRequest, RemotePlanner


def main(endpoint: str, prompt: str) -> int:
    """Print steps as they come, then how the plan ended."""
    with RemotePlanner(endpoint) as planner:
        request = PlanRequest(prompt=prompt, stream="steps", deadline_ms=10_000)
        try:
            for event in planner.stream(request):
                if isinstance(event, Chunk):
                    print("step", event.step["skill"], event.step["args"])
                else:
                    print("done", event.finish_reason, "valid" if event.plan_valid else "invalid")
        except PlanError as error:
            print("refused", error.code, error)
            return 1
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        print("usage: plan.py ENDPOINT TEXT", file=sys.stderr)
        sys.exit(2)
    sys.exit(main(*sys.argv[1:]))
