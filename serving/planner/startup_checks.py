"""What must fit before a server is ready. Otherwise it would start and then fail at every plan."""

from __future__ import annotations

from thor_dflash.core.errors import ConfigError
from thor_dflash.runtime.decoding.model_runner import ModelRunner
from thor_dflash.runtime.session.turn_cache import TurnCache


def check_self_test(model: ModelRunner, prompt: int, answer: int) -> None:
    """Refuse a context too short for the self-test; sizes in tokens.

    Raises:
        ConfigError: naming the capacity that is needed.
    """
    if (lacks := prompt + answer - model.limit) > 0:
        raise ConfigError(
            f"engine.capacity must be at least {model.capacity + lacks} to serve: the self-test "
            f"has a prompt of {prompt} tokens, an answer of {answer} and a block "
            f"(got {model.capacity})"
        )


def check_answer(max_tokens: int, model: ModelRunner, prompt: int, closing: int) -> None:
    """Refuse a default length of answers for which a plan that takes all defaults has no space.
    `prompt` is that of the shortest plan, `closing` the message that closes its thinking, 0 without
    thinking; in tokens.

    Raises:
        ConfigError: naming the longest that fits.
    """
    closed = f" and the message that closes the thinking {closing}" if closing else ""
    if max_tokens > (most := model.limit - prompt - closing):
        raise ConfigError(
            f"serve.max_tokens must be at most {most}: the context has {model.limit} tokens, of "
            f"which the shortest prompt takes {prompt}{closed} (got {max_tokens})"
        )


def check_watchdog(watchdog_s: float, step_ms: float) -> None:
    """Refuse a watchdog that would take a step of this machine for a dead device.

    Raises:
        ConfigError: naming the time of the slowest prefill step that the server takes.
    """
    if 1e3 * watchdog_s <= step_ms:
        raise ConfigError(
            f"serve.watchdog_s must be above {step_ms / 1e3:.3g} s, which a prefill step takes "
            f"here (got {watchdog_s:g})"
        )


def check_reuse(reuse_mb: int, turns: TurnCache) -> None:
    """Refuse memory for reuse in which not even one boundary fits: nothing would ever be reused.

    Raises:
        ConfigError: naming the least that does.
    """
    pages = turns.layout()
    if turns.model.reuse and pages.count < len(pages.light):
        least = -(-len(pages.light) * pages.nbytes // (1 << 20))
        raise ConfigError(
            f"serve.reuse_mb must be at least {least}, one boundary of this package, or 0 "
            f"(got {reuse_mb})"
        )
