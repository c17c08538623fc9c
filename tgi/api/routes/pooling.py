"""Routes of models that end in a vector: OpenAI's embeddings, ranking, scores and classes as vLLM, Cohere and Jina have
them, and those of Text Embeddings Inference."""

import asyncio
from base64 import b64encode
from collections.abc import Sequence

import msgspec
from falcon.asgi import Request, Response

from tgi.api import errors
from tgi.api.json_body import JsonBody
from tgi.api.pooling import (
    InputOptions,
    PooledResults,
    TextInput,
    embedding,
    probabilities,
    run_inputs,
    score_pairs,
    set_headers,
    truncation,
)
from tgi.api.resumption import response_key
from tgi.api.service import Resource
from tgi.api.shapes.pooling import (
    Classification,
    ClassificationList,
    ClassifyRequest,
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    EmbedRequest,
    Prediction,
    PredictRequest,
    Rank,
    RankedDocument,
    RankedResult,
    RerankRequest,
    RerankResponse,
    Score,
    ScoreList,
    ScoreRequest,
    SimilarityRequest,
    items_of,
)
from tgi.microkernel.messages.protocol import ModelTask

# Numbers that are formatted before other requests have a turn.
NUMBERS_PER_TURN = 1 << 15


class _PoolingResource(Resource):
    """What the routes share."""

    async def _embeddings(
        self, results: PooledResults, normalize: bool, dimensions: int | None, base64: bool = False
    ) -> list[list[float] | str]:
        """The vectors of all inputs, in turns with other requests."""
        found: list[list[float] | str] = []
        numbers = 0
        for index in range(len(results.generations)):
            vector = embedding(results.vector(index), normalize, dimensions)
            found.append(b64encode(vector.tobytes()).decode() if base64 else vector.tolist())
            numbers += len(vector)
            if numbers >= NUMBERS_PER_TURN:
                numbers = 0
                await asyncio.sleep(0)
        return found

    def _send(self, resp: Response, results: PooledResults, body: object) -> None:
        set_headers(self._service, resp, results)
        resp.data = msgspec.json.encode(body)

    def _identity(self, req: Request, prefix: str) -> tuple[str, int]:
        """The id of a response, and the time in seconds."""
        key = response_key(req)
        return f"{prefix}-{key.response_id}", key.created


class EmbeddingsResource(_PoolingResource):
    """POST /v1/embeddings."""

    body = JsonBody(EmbeddingRequest)

    async def on_post(self, req: Request, resp: Response) -> None:
        request = await self._service.read_generation_body(req, self.body)
        self._service.require_task(ModelTask.EMBED)
        options = truncation(None, request.truncate_prompt_tokens, request.truncation_side)._replace(
            prompt=request.prompt_name or "", add_special_tokens=request.add_special_tokens is not False
        )
        inputs = [TextInput.of(item) for item in items_of(request.input, "input")]
        results = await run_inputs(self._service, req, inputs, options)
        normalize = self._service.router.source.normalizes if request.normalize is None else request.normalize
        base64 = request.encoding_format == "base64"
        vectors = await self._embeddings(
            results, normalize or request.dimensions is not None, request.dimensions, base64
        )
        data = [Embedding("embedding", index, vector) for index, vector in enumerate(vectors)]
        self._send(resp, results, EmbeddingList("list", data, self._service.model_id, results.usage))


class EmbedResource(_PoolingResource):
    """POST /embed."""

    body = JsonBody(EmbedRequest)

    async def on_post(self, req: Request, resp: Response) -> None:
        request = await self._service.read_generation_body(req, self.body)
        self._service.require_task(ModelTask.EMBED)
        options = truncation(request.truncate, None, request.truncation_direction)._replace(
            prompt=request.prompt_name or ""
        )
        inputs = [TextInput.of(item) for item in items_of(request.inputs, "inputs")]
        results = await run_inputs(self._service, req, inputs, options)
        normalize = request.normalize is not False
        self._send(resp, results, await self._embeddings(results, normalize, request.dimensions))


class RerankResource(_PoolingResource):
    """POST /rerank, /v1/rerank and /v2/rerank."""

    body = JsonBody(RerankRequest)

    async def on_post(self, req: Request, resp: Response) -> None:
        """Answers with the documents by their scores, in the form that the request has."""
        request = await self._service.read_generation_body(req, self.body)
        candidates = request.candidates
        options = truncation(request.truncate, request.truncate_prompt_tokens, request.truncation_direction)
        pairs = [(request.query, text) for text in candidates]
        scores, results = await score_pairs(self._service, req, pairs, options, bool(request.raw_scores))
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        if request.texts is not None:
            shown = bool(request.return_text)
            ranks = [Rank(index, scores[index], candidates[index] if shown else None) for index in order]
            self._send(resp, results, ranks)
            return
        shown = request.return_documents is not False
        best = [
            RankedResult(index, scores[index], RankedDocument(candidates[index]) if shown else None)
            for index in order[: request.top_n or None]
        ]
        name, _ = self._identity(req, "rerank")
        self._send(resp, results, RerankResponse(name, self._service.model_id, results.usage, best))


class ScoreResource(_PoolingResource):
    """POST /score and /v1/score."""

    body = JsonBody(ScoreRequest)

    async def on_post(self, req: Request, resp: Response) -> None:
        request = await self._service.read_generation_body(req, self.body)
        options, pairs = truncation(None, request.truncate_prompt_tokens, None), request.pairs
        if pairs is None:
            raise errors.validation_error("`text_1` must have one text, or as many as `text_2`", param="text_1")
        scores, results = await score_pairs(self._service, req, pairs, options)
        name, created = self._identity(req, "score")
        data = [Score(index, "score", score) for index, score in enumerate(scores)]
        self._send(resp, results, ScoreList(name, "list", created, self._service.model_id, data, results.usage))


class SimilarityResource(_PoolingResource):
    """POST /similarity."""

    body = JsonBody(SimilarityRequest)

    async def on_post(self, req: Request, resp: Response) -> None:
        request = await self._service.read_generation_body(req, self.body)
        options = truncation(request.truncate, None, request.truncation_direction)
        pairs = [(request.inputs.source_sentence, sentence) for sentence in request.inputs.sentences]
        scores, results = await score_pairs(self._service, req, pairs, options)
        self._send(resp, results, scores)


class _ClassifyingResource(_PoolingResource):
    """What /classify and /predict share."""

    async def _classify(
        self, req: Request, inputs: Sequence[TextInput], options: InputOptions, raw: bool = False
    ) -> tuple[list[list[float]], PooledResults]:
        """The probability of each class for each input, or the logits if `raw`."""
        self._service.require_task(ModelTask.CLASSIFY)
        results = await run_inputs(self._service, req, inputs, options)
        logits = [results.vector(index).tolist() for index in range(len(inputs))]
        independent = self._service.router.source.multi_label
        return [one if raw else probabilities(one, independent) for one in logits], results

    def _labels(self) -> list[str]:
        return self._service.router.source.labels


class ClassifyResource(_ClassifyingResource):
    """POST /classify and /v1/classify."""

    body = JsonBody(ClassifyRequest)

    async def on_post(self, req: Request, resp: Response) -> None:
        request = await self._service.read_generation_body(req, self.body)
        inputs = [TextInput.of(item) for item in items_of(request.input, "input")]
        options = truncation(None, request.truncate_prompt_tokens, None)
        found, results = await self._classify(req, inputs, options)
        labels = self._labels()
        data = [
            Classification(index, labels[probs.index(max(probs))], probs, len(probs))
            for index, probs in enumerate(found)
        ]
        name, created = self._identity(req, "classify")
        model = self._service.model_id
        self._send(resp, results, ClassificationList(name, "list", created, model, data, results.usage))


class PredictResource(_ClassifyingResource):
    """POST /predict."""

    body = JsonBody(PredictRequest)

    async def on_post(self, req: Request, resp: Response) -> None:
        """Answers with an array of classes, or of such arrays, the likeliest first."""
        request = await self._service.read_generation_body(req, self.body)
        inputs = [TextInput(item[0], pair=item[1] if len(item) > 1 else None) for item in request.items]
        options = truncation(request.truncate, None, request.truncation_direction)
        found, results = await self._classify(req, inputs, options, bool(request.raw_scores))
        labels = self._labels()
        predictions = [sorted(map(Prediction, scores, labels), key=lambda one: -one.score) for scores in found]
        self._send(resp, results, predictions[0] if request.single else predictions)
