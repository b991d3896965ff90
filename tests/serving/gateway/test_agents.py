"""The page on agents, and clients of agents as they are, against the gateway over a mock."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from support.http_gateway import gateway

from thor_dflash.serving.planner.mock_backend import PLAN

PAGE = (Path(__file__).parents[3] / "docs/guide/agents.md").read_text(encoding="utf-8")
OPENAI, LANGCHAIN, AGENTS = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)


def run(code: str, address: str) -> None:
    """Run an example of the page against this gateway."""
    assert code.count("http://127.0.0.1:8000") == 1
    exec(code.replace("http://127.0.0.1:8000", address), {"__name__": "page"})


def test_the_loop_of_the_page(house: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with gateway(house.mock().endpoints[0]) as address:
        run(OPENAI, address)
    assert capsys.readouterr().out.strip() == PLAN


@pytest.mark.slow
def test_langchain(house: Any, capsys: pytest.CaptureFixture[str]) -> None:
    langchain = pytest.importorskip("langchain_openai")
    core = pytest.importorskip("langchain_core.tools")
    pydantic = pytest.importorskip("pydantic")

    def move_arm(arm: str, speed: float = 1.0) -> str:
        """Move an arm."""
        return f"moved {arm} at {speed}"

    class Plan(pydantic.BaseModel):  # type: ignore[name-defined, misc]
        goal: str

    Plan.model_rebuild(_types_namespace={"str": str})
    tool = core.tool(move_arm)
    with gateway(house.mock().endpoints[0]) as address:
        run(LANGCHAIN, address)
        assert capsys.readouterr().out == "moved mock\n"
        model = langchain.ChatOpenAI(model="mock", base_url=f"{address}/v1", api_key="none")
        demanded = {"tool_choice": "any", "strict": True, "parallel_tool_calls": False}
        for bound in (model.bind_tools([tool]), model.bind_tools([tool], **demanded)):
            whole = bound.invoke("Left.")
            pieces = list(bound.stream("Left."))
            streamed = sum(pieces[1:], start=pieces[0])
            for answer in (whole, streamed):
                [call] = answer.tool_calls
                assert (call["name"], answer.content) == ("move_arm", "")
                assert call["args"]["arm"] == "mock"
                assert not answer.invalid_tool_calls
            results = [("user", "Left."), whole, tool.invoke(whole.tool_calls[0])]
            after = model.bind_tools([tool]).invoke(results)
            assert after.content == PLAN
        for method in ("json_schema", "json_mode", "function_calling"):
            found = model.with_structured_output(Plan, method=method).invoke("Left.")
            assert found.goal == ("mock" if method == "function_calling" else "cup on table")


@pytest.mark.slow
def test_openai_agents(house: Any, capsys: pytest.CaptureFixture[str]) -> None:
    agents = pytest.importorskip("agents")
    openai = pytest.importorskip("openai")
    made: list[str] = []

    def move_arm(arm: str, speed: float = 1.0) -> str:
        """Move an arm."""
        made.append(arm)
        return f"moved {arm}"

    async def both(address: str) -> None:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:
            model = agents.OpenAIChatCompletionsModel(model="mock", openai_client=client)
            tools = [agents.function_tool(move_arm)]
            arm = agents.Agent(name="arm", instructions="You move.", tools=tools, model=model)
            whole = await agents.Runner.run(arm, "Left.")
            streamed = agents.Runner.run_streamed(arm, "Left.")
            async for _ in streamed.stream_events():
                pass
        kinds = [[type(item).__name__ for item in run.new_items] for run in (whole, streamed)]
        assert kinds[0] == kinds[1]
        assert [kind for kind in kinds[0] if kind != "ReasoningItem"] == [
            "ToolCallItem", "ToolCallOutputItem", "MessageOutputItem",
        ]  # fmt: skip
        assert whole.final_output.strip() == streamed.final_output.strip() == PLAN

    with gateway(house.mock().endpoints[0]) as address:
        run(AGENTS, address)
        assert capsys.readouterr().out.strip() == PLAN
        asyncio.run(both(address))
    assert made == ["mock", "mock"]
