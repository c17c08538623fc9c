"""A minimal HTTP server around OpenVINO GenAI's continuous batching, which has none: POST /v1/completions, streamed.

    python openvino_server.py DIRECTORY --port PORT
    python openvino_server.py --kernel                 prints the name of the kernel that it chooses for a product

Runs in the peer's environment and imports nothing else of this project. It is minimal so that the library is
measured: a step holds the GIL, so the event loop itself steps, writes the results to all streams, and accepts new
requests before the next step.
"""

import argparse
import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino  # type: ignore[import-not-found]
import openvino_genai as genai  # type: ignore[import-not-found]
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

CACHE_GB = 4
PROPERTIES = {"INFERENCE_PRECISION_HINT": "bf16"}  # float32 where the processor has no arithmetic in bfloat16
TURNS = 5  # of the event loop between steps: enough to read a request from a new connection
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


@dataclass
class Request:
    """A running stream."""

    handle: Any
    writer: asyncio.StreamWriter
    tokens_in: int
    decoder: DecodeStream
    tokens_out: int = 0


class Front:
    """The pipeline and its requests."""

    def __init__(self, directory: Path) -> None:
        config = genai.SchedulerConfig()
        config.cache_size = CACHE_GB
        config.enable_prefix_caching = True
        config.dynamic_split_fuse = True
        config.max_num_batched_tokens = 512
        self.pipeline = genai.ContinuousBatchingPipeline(str(directory), config, "CPU", PROPERTIES)
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.some = asyncio.Event()  # set while there are requests
        self.requests: dict[int, Request] = {}
        self.added = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection with one request."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
        except asyncio.IncompleteReadError:
            head = ""
        if not head.startswith("POST /v1/completions "):
            writer.write(NOT_FOUND)
            writer.close()
            return
        length = next(line.partition(":")[2] for line in head.splitlines() if line.lower().startswith("content-length"))
        body = json.loads(await reader.readexactly(int(length)))
        config = genai.GenerationConfig(
            max_new_tokens=body["max_tokens"], ignore_eos=True, do_sample=False, apply_chat_template=False
        )
        ids = self.pipeline.get_tokenizer().encode(body["prompt"], add_special_tokens=False).input_ids
        writer.write(HEAD)
        self.added += 1
        handle = self.pipeline.add_request(self.added, ids, config)
        self.requests[self.added] = Request(handle, writer, ids.shape[1], DecodeStream(skip_special_tokens=False))
        self.some.set()

    async def steps(self) -> None:
        """Runs steps forever."""
        while True:
            await self.some.wait()
            self.pipeline.step()
            for number, request in list(self.requests.items()):
                while request.handle.can_read():
                    for output in request.handle.read().values():
                        request.writer.write(self.events(request, output))
                if request.handle.get_status() != genai.GenerationStatus.RUNNING:
                    request.writer.write(last(request))
                    request.writer.close()
                    del self.requests[number]
            if not self.requests:
                self.some.clear()
            for _ in range(TURNS):
                await asyncio.sleep(0)

    def events(self, request: Request, output: Any) -> bytes:
        """The event of one step for one stream."""
        found = b""
        for token in output.generated_ids:
            request.tokens_out += 1
            text = request.decoder.step(self.tokenizer, token)
            found += event({"choices": [{"index": 0, "text": text or "", "finish_reason": None}]})
        return found


def last(request: Request) -> bytes:
    """The last events of a stream."""
    usage = {"prompt_tokens": request.tokens_in, "completion_tokens": request.tokens_out}
    choice = {"index": 0, "text": "", "finish_reason": "length"}
    return event({"choices": [choice], "usage": usage}) + b"data: [DONE]\n\n"


def event(data: dict[str, Any]) -> bytes:
    """A server-sent event as bytes."""
    return b"data: %b\n\n" % json.dumps(data).encode()


async def serve(front: Front, port: int) -> None:
    """Serves until cancelled."""
    server = await asyncio.start_server(front.answer, "127.0.0.1", port)
    await asyncio.gather(server.serve_forever(), front.steps())


def kernel() -> str:
    """The kernel that computes a layer of a model, with the instruction set or the type in its name."""
    ops = openvino.opset13
    rows = ops.parameter([-1, 64], openvino.Type.f32)
    weight = ops.constant([[1.0] * 64] * 64, openvino.Type.f32)
    model = openvino.Model([ops.matmul(rows, weight, False, True)], [rows])
    compiled = openvino.Core().compile_model(model, "CPU", PROPERTIES)
    compiled([np.ones((4, 64), np.float32)])  # kernels are chosen at the first inference
    found = [node.get_rt_info() for node in compiled.get_runtime_model().get_ops()]
    return next(str(one["primitiveType"].value) for one in found if one["layerType"].value == "FullyConnected")


def main() -> None:
    """Parses the command line and serves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?")
    parser.add_argument("--port", type=int)
    parser.add_argument("--kernel", action="store_true")
    arguments = parser.parse_args()
    if arguments.kernel:
        print(kernel())
        return
    asyncio.run(serve(Front(arguments.directory), arguments.port))


if __name__ == "__main__":
    main()
