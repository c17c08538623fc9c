"""Loads a model: reads config.json, chooses the implementation, and loads the weights."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from tgi.hub.model_config import T5_FAMILY, is_eagle3
from tgi.hub.weight_files import weights_identity
from tgi.microkernel.errors import UserError
from tgi.worker.checkpoint import Checkpoint, RandomCheckpoint
from tgi.worker.cpu_kernels.kernels import CpuKernels
from tgi.worker.cpu_kernels.quantizer import CpuQuantizer
from tgi.worker.decoder_config import DecoderConfig, UnsupportedConfig
from tgi.worker.distributed.communicator import Communicator
from tgi.worker.distributed.sharding import shard_decoder, whole_model
from tgi.worker.gpu_kernels.kernels import GpuKernels
from tgi.worker.layers.embedding import Embedding
from tgi.worker.models.config_reader import IS_PART, read_config, read_config_file, read_decoder_config
from tgi.worker.models.decoder import DecoderModel
from tgi.worker.models.decoder_layer import DecoderWeights
from tgi.worker.models.draft_head import DraftHead
from tgi.worker.models.draft_head_config import DraftHeadConfig, read_eagle3_config, read_mtp_config
from tgi.worker.models.dtype import resolve_dtype, warn_of_emulation
from tgi.worker.models.families import FAMILIES
from tgi.worker.models.interface import Model
from tgi.worker.models.packed_weights import PackedWeightFiles
from tgi.worker.models.stacked_experts import open_checkpoint
from tgi.worker.models.t5 import build_t5_model
from tgi.worker.models.weight_loader import DecoderWeightLoader, read_kv_scales, read_targets, stored_embedding
from tgi.worker.quantization import float8
from tgi.worker.quantization.quantize import quantize_weight
from tgi.worker.quantization.scheme import QuantizationScheme, resolve_scheme

log = logging.getLogger(__name__)

Progress = Callable[[str, int], None]  # stage, percent


class ModelSpec(NamedTuple):
    """How a model is computed, from its config.json and the options."""

    decoder: DecoderConfig | None  # None: the model runs through transformers, unless `encoder_decoder`
    dtype: torch.dtype
    scheme: QuantizationScheme = QuantizationScheme()
    encoder_decoder: bool = False  # then `decoder` is None, and the model is that of models/t5.py

    @property
    def has_experts(self) -> bool:
        """Whether it is a mixture of experts."""
        return self.decoder is not None and self.decoder.experts is not None

    @property
    def is_quantized(self) -> bool:
        """Whether weights are quantized, in the checkpoint or at load."""
        return self.scheme != QuantizationScheme()

    @property
    def is_latent(self) -> bool:
        """Whether its attention is latent attention."""
        return self.decoder is not None and self.decoder.latent is not None

    @property
    def mixer_kernels(self) -> tuple[str, ...]:
        """The modules of gpu_kernels/ that its recurrent layers need."""
        recurrent = None if self.decoder is None else self.decoder.recurrent
        return () if recurrent is None else recurrent.gpu_kernels


def read_model_spec(directory: Path, dtype: str, quantize: str | None = None) -> ModelSpec:
    """The ModelSpec of a model directory.

    `dtype` is "auto" (the model's own), "float32", "bfloat16" or "float16"; `quantize` is None or one of
    settings.QUANTIZATIONS. Of an EAGLE-3 head, the decoder is its layer. Raises UserError if the model cannot be
    served.
    """
    config = read_config_file(directory)
    if is_eagle3(config):
        head = read_eagle3_config(directory)
        return ModelSpec(head.decoder, resolve_dtype(config, dtype), resolve_scheme(directory, config, quantize))
    config = read_config(directory)
    number = resolve_dtype(config, dtype)
    scheme = resolve_scheme(directory, config, quantize)
    if config["model_type"] in T5_FAMILY:
        if scheme != QuantizationScheme() or config.get("quantization_config") is not None:
            raise UserError(
                f"{config['model_type']} is an encoder-decoder model, which is not computed with quantized weights. "
                "Serve the original weights, without --quantize."
            )
        return ModelSpec(None, number, encoder_decoder=True)
    if config["model_type"] in FAMILIES:
        try:
            return ModelSpec(read_decoder_config(config), number, scheme)
        except UnsupportedConfig as reason:
            if FAMILIES[config["model_type"]].mixer is not None:  # transformers_model.py has attention alone
                raise UserError(
                    f"{directory}/config.json has {reason}, which is not served of {config['model_type']}."
                ) from reason
            log.debug("%s in %s/config.json: this model runs through transformers", reason, directory)
        except KeyError as error:
            if IS_PART in config:  # which leaves out what is the default of its class
                log.debug("%s/config.json has no %s: this model runs through transformers", directory, error)
                return ModelSpec(None, number)
            raise UserError(f"{directory}/config.json has no {error}, which {config['model_type']} needs.") from error
    if scheme != QuantizationScheme() or config.get("quantization_config") is not None:
        raise UserError(
            f"The model in {directory} runs through transformers, which cannot be done with quantized weights. Serve "
            "the original weights, without --quantize."
        )
    return ModelSpec(None, number)


def build_model(
    directory: Path,
    dtype: str,
    device: str,
    progress: Progress,
    trust_code: bool = False,
    kernels: CpuKernels | None = None,
    quantize: str | None = None,
    gpu: GpuKernels | None = None,
    quantized_cache: bool = False,
    communicator: Communicator | None = None,
    dummy: bool = False,
    files: PackedWeightFiles | None = None,
) -> Model:
    """Loads the model of a directory onto `device` ("cpu", "cuda"). `dtype` and `quantize` as in read_model_spec.

    `trust_code` allows Python code in the directory to run. `kernels` are our CPU kernels, which must support this
    model, and `gpu` our GPU kernels; None = torch's. `quantized_cache`: the KV cache will have an 8-bit type, so its
    scales are loaded. `communicator`: this is one rank of several, each with a part of the model. `dummy`: random
    weights instead of those of the directory. `files` has weights that were packed before. `progress` is called with a
    stage and a percentage. Raises UserError if the model cannot be served.
    """
    spec = read_model_spec(directory, dtype, quantize)
    if device == "cpu" and kernels is None:
        warn_of_emulation(spec.dtype)
    if spec.decoder is not None:
        return _build_decoder(
            directory, spec.decoder, spec, torch.device(device), progress, kernels, gpu, quantized_cache, communicator,
            dummy, files,
        )  # fmt: skip
    if spec.encoder_decoder:
        for option, given in (
            ("--kv-cache-dtype", quantized_cache),
            ("--load-format dummy", dummy),
            ("--num-shard", communicator is not None),
        ):
            if given:
                raise UserError(f"{option} is not for encoder-decoder models, as that in {directory}. Leave it out.")
        return build_t5_model(directory, read_config(directory), spec.dtype, torch.device(device), progress, gpu)
    if dummy:
        raise UserError(
            f"--load-format dummy is not for the model in {directory}, which runs through transformers. Leave it out, "
            "or choose a model that this server computes itself (docs/models.md)."
        )
    if communicator is not None:
        raise UserError(
            f"The model in {directory} runs through transformers, which computes it on one device only. Start without "
            "--num-shard."
        )
    from tgi.worker.models.transformers_model import (
        build_transformers_model,  # imports transformers, which takes seconds
    )

    return build_transformers_model(directory, spec.dtype, torch.device(device), progress, trust_code, gpu)


class HeadOptions(NamedTuple):
    """How a head that drafts is computed: arguments of `build_model`."""

    dtype: str
    kernels: CpuKernels | None = None
    quantize: str | None = None
    gpu: GpuKernels | None = None


def build_mtp(directory: Path, served: Model, options: HeadOptions) -> DraftHead:
    """Loads the MTP layer of the served model, which is that of this directory. Raises UserError if it has none."""
    spec = read_model_spec(directory, options.dtype, options.quantize)
    if spec.decoder is None or not isinstance(served, DecoderModel):
        raise UserError(
            f"The model in {directory} runs through transformers, where its layer for multi-token prediction is not "
            "computed. Start with --speculate and without --draft-model-id."
        )
    with open_checkpoint(directory, spec.decoder) as checkpoint:
        config = read_mtp_config(directory, set(checkpoint), spec.decoder)
        return _build_draft_head(checkpoint, config, spec, served, options)


def build_eagle3(directory: Path, served: Model, options: HeadOptions) -> DraftHead:
    """Loads the EAGLE-3 head of this directory. Raises UserError if it is not for the served model."""
    if not isinstance(served, DecoderModel):
        raise UserError(
            "An EAGLE-3 head drafts for models of the built-in decoder only, and the served model is computed "
            "otherwise. Start with --speculate and without --draft-model-id."
        )
    spec = read_model_spec(directory, options.dtype, options.quantize)
    config = read_eagle3_config(directory, served.whole_config)
    with open_checkpoint(directory, config.decoder) as checkpoint:
        return _build_draft_head(checkpoint, config, spec, served, options)


def _build_draft_head(
    checkpoint: Checkpoint,
    head: DraftHeadConfig,
    spec: ModelSpec,
    served: DecoderModel,
    options: HeadOptions,
) -> DraftHead:
    config, device, kernels = head.decoder, served.device, options.kernels
    quantizer = quantize_weight if kernels is None else CpuQuantizer(kernels).quantize_weight
    exact = spec.dtype is torch.float32
    source = spec.scheme.source(checkpoint, quantizer, float8.stays_float8_on(device), exact=exact)
    with torch.inference_mode():
        loader = DecoderWeightLoader(source, config, whole_model(config), spec.dtype, device, kernels, options.gpu)
        weights = loader.load_draft_head(head)
        if head.names.targets is not None:
            targets = read_targets(checkpoint, head.names.targets, head.scored, config.vocab_size)
            weights = weights._replace(targets=targets.to(device))
        if config.hidden != served.hidden_size and None in (weights.embedding, weights.head):
            raise UserError(
                f"The head in {checkpoint.directory} has hidden states of {config.hidden} numbers, and the model of "
                f"{served.hidden_size}, so it needs an embedding and an output head of its own, which its weights lack."
            )
        return DraftHead(head, weights, served)


def _build_decoder(
    directory: Path,
    config: DecoderConfig,
    spec: ModelSpec,
    device: torch.device,
    progress: Progress,
    kernels: CpuKernels | None,
    gpu: GpuKernels | None,
    quantized_cache: bool,
    communicator: Communicator | None,
    dummy: bool,
    files: PackedWeightFiles | None,
) -> DecoderModel:
    progress("loading weights", 0)
    dtype, scheme = spec.dtype, spec.scheme
    rank, ranks = (0, 1) if communicator is None else (communicator.rank, communicator.ranks)
    shard = shard_decoder(config, rank, ranks)
    exact = dtype is torch.float32
    if scheme.made is not None and device.type == "cpu" and kernels is None:
        log.warning("--quantize saves no memory here: torch's CPU kernels need dequantized weights")
    if dummy and scheme.stored is not None:
        raise UserError("--load-format dummy makes plain weights. Choose a model that is not quantized, or --quantize.")

    def stored() -> Checkpoint:
        return RandomCheckpoint(device, directory) if dummy else open_checkpoint(directory, config)

    def load(checkpoint: Checkpoint) -> DecoderWeights:
        quantize = quantize_weight if kernels is None else CpuQuantizer(kernels).quantize_weight
        source = scheme.source(checkpoint, quantize, float8.stays_float8_on(device), exact=exact)
        reader = DecoderWeightLoader(source, config, shard, dtype, device, kernels, gpu)
        return reader.load(lambda percent: progress("loading weights", percent * 9 // 10))

    with stored() as checkpoint, torch.inference_mode():
        if (
            files is None or kernels is None or dummy or config.layer_inputs is not None
        ):  # which stay in the mapped file
            weights = load(checkpoint)
        else:
            identity = {
                "files": weights_identity(directory), "config": repr(config), "rank": [rank, ranks],
                "scheme": repr(scheme), "dtype": str(dtype),
            }  # fmt: skip
            if (found := files.read(identity, kernels)) is None:
                weights = load(checkpoint)
                nothing = Embedding(torch.empty(0), dtype)  # which is read from the checkpoint
                own = weights if weights.embedding.shared else weights._replace(embedding=nothing)
                files.keep(identity, own, kernels)
            else:
                weights = found
        scales = read_kv_scales(checkpoint, config.attention_layers) if quantized_cache else ()
    if device.type == "cpu" and (scheme.made is not None or not weights.embedding.shared):
        # Maps the file again for the embedding, which releases the pages read so far; lookups read only their rows.
        with stored() as checkpoint:
            weights = weights._replace(
                embedding=stored_embedding(scheme.stored_source(checkpoint, exact=exact), config, dtype)
            )
    progress("measuring kernels", 95)
    return DecoderModel(config, weights, dtype, device, kernels, gpu, scales, shard, communicator)
