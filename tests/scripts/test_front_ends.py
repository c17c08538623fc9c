"""The benchmark of front ends: control groups and counted requests."""

import asyncio

import pytest

from scripts.benchmarks import front_ends
from scripts.benchmarks.servers import Failed

pytestmark = pytest.mark.live


def groups() -> set[str]:
    return {path.name for pattern in ("tgi-*", "*/tgi-*") for path in front_ends.GROUPS.glob(pattern)}


def test_a_control_group_without_a_limit_is_removed() -> None:
    before = groups()
    with pytest.raises(Failed, match="no control group can be made that limits CPU time"):
        front_ends.Cage(0.01)  # less than the kernel allows, or no permission to create groups
    assert groups() <= before


def test_rejections_before_all_front_ends_are_ready_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_ends, "WARM_SECONDS", 0.1)
    asked = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await reader.read(1000)
        status = "503 Service Unavailable" if asked == 1 else "200 OK"
        writer.write(f"HTTP/1.1 {status}\r\n\r\ndata: {{}}\n\n".encode())
        await writer.drain()
        writer.close()

    async def measured() -> float:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            pace, _ = await front_ends.load(server.sockets[0].getsockname()[1], [{}], 0.1, lambda: 0.0)
            return pace

    assert asyncio.run(measured()) > 0
