"""Request a plan and act on each step as soon as it is whole.

python docs/examples/plan.py tcp://127.0.0.1:5571 "Bring the cup to the table."
"""

import sys

from thor_dflash.core.errors import ThorError
from thor_dflash.serving.client import Chunk, PlanRequest, RemotePlanner


def main(endpoint: str, prompt: str) -> int:
    """Print steps as they come, then how the plan ended. Returns 0 for a whole and valid plan."""
    request = PlanRequest(prompt=prompt, stream="steps", deadline_ms=10_000)
    try:
        with RemotePlanner(endpoint) as planner:
            for event in planner.stream(request):
                if isinstance(event, Chunk):
                    step = event.step or {}  # None in chunks of other streams
                    print("step", step.get("skill"), step.get("args"))
                elif event.status == "ok" and event.plan_valid:
                    print("done", event.usage.output_tokens, "tokens")
                else:  # cut short, wrong, or a text without a plan
                    print("failed", event.status, event.finish_reason)
                    return 1
    except ThorError as error:  # a PlanError of the server, or a malformed endpoint
        print("refused", repr(error))
        return 1
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        print("usage: plan.py ENDPOINT TEXT", file=sys.stderr)
        sys.exit(2)
    sys.exit(main(*sys.argv[1:]))
