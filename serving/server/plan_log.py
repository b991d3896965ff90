"""The line of the server's log for each plan: how it ended, its tokens and times."""

from __future__ import annotations

import re
import time
from typing import Any

from thor_dflash.core.errors import PlanError
from thor_dflash.core.message_text import show
from thor_dflash.serving.protocol import messages
from thor_dflash.serving.server.scheduler import Job

_PLAIN = re.compile(r"[\w.:+-]+", re.ASCII)


def plan_line(job: Job, outcome: messages.Result | PlanError) -> str:
    """Return `plan id=... ended=... ms=...`, in logfmt: a value with other characters is quoted.
    `ended` is the finish reason of a result, or the code of an error.
    """
    fields: dict[str, object] = {"id": job.request.id}
    if isinstance(job.request, messages.PlanRequest) and job.request.session is not None:
        fields["session"] = job.request.session
    if isinstance(outcome, PlanError):
        fields["ended"] = outcome.code
    else:
        fields |= _of_result(outcome)
    fields["ms"] = round(1e3 * (time.monotonic() - job.arrived))
    if job.gone:
        fields["client"] = "gone"
    return f"plan {' '.join(f'{name}={_value(value)}' for name, value in fields.items())}"


def _of_result(result: messages.Result) -> dict[str, Any]:
    usage, spec = result.usage, result.spec
    return {
        "ended": result.finish_reason,
        "status": result.status,
        "valid": str(result.plan_valid).lower(),
        "prompt": usage.prompt_tokens,
        "cached": usage.cached_tokens,
        **({"images": len(result.images)} if result.images else {}),
        "thinking": usage.thinking_tokens,
        "answer": usage.output_tokens,
        "accept_len": f"{spec.accept_len if spec else 1.0:.2f}",
    }


def _value(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else show(text)
