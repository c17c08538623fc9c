"""The vision tower and the projector of a multimodal model: transformers' own modules, loaded without its decoder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tgi.hub.vision_towers import VisionFamily
from tgi.microkernel.errors import UserError
from tgi.worker.checkpoint import Checkpoint
from tgi.worker.cpu_kernels.kernels import CpuKernels
from tgi.worker.vision.cpu_layers import replace_layers
from tgi.worker.vision.features import ImageFeatures
from tgi.worker.vision.image_file import BadImage
from tgi.worker.vision.tower_run import TowerRun


class VisionTower:
    """Computes the features of an image. Images are computed one by one, so a result depends on its image alone."""

    def __init__(self, model: nn.Module, family: VisionFamily, dtype: torch.dtype, device: torch.device) -> None:
        self.family = family
        self.image_token_id: int = model.config.image_token_id
        self.merge = int(getattr(model.config.vision_config, "spatial_merge_size", 1))  # patches of a token, squared
        self.nbytes = sum(one.nbytes for name, one in model.named_parameters() if not _of_decoder(name))
        self._model = model
        self._dtype = dtype
        self._device = device
        self._running: TowerRun | None = None
        # Slices are the attention and the MLP of a layer, where transformers calls it so, else the layer; the first and
        # the last one with what comes before and after. On two cores half a layer of SigLIP base takes 10 ms.
        layers = max((one for one in model.modules() if isinstance(one, nn.ModuleList)), key=len, default=())
        # On a GPU a tower takes milliseconds, and what the thread of a run launches would be on another stream.
        layers = layers if device.type == "cpu" and not family.crosses else ()
        begins = [one for layer in layers for one in (layer, getattr(layer, "mlp", None)) if one is not None]
        self.slices = max(1, len(begins))
        for one in begins[1:]:
            one.register_forward_pre_hook(self._between_slices)

    def begin(self, read: Callable[[], dict[str, Tensor]]) -> TowerRun:
        """A run that computes the image with the tensors that `read` returns. See `compute`."""
        return TowerRun(lambda: self.compute(read()))

    def advance(self, run: TowerRun, slices: int) -> ImageFeatures | None:
        """Computes the next `slices` slices. Returns the features if they are complete. Raises BadImage."""
        self._running = run
        try:
            return run.advance(slices)
        finally:
            self._running = None

    def _between_slices(self, *_: Any) -> None:
        if self._running is not None:
            self._running.pause()

    @torch.inference_mode()
    def compute(self, tensors: dict[str, Tensor]) -> ImageFeatures:
        """The features of the image with these tensors of the processor. Raises BadImage if they do not fit."""
        inputs = {name: self._to_device(tensor) for name, tensor in tensors.items()}
        try:
            if self.family.crosses:
                return ImageFeatures(self._joined(self._states(**inputs)))
            outputs = self._model.get_image_features(**inputs)
            if not self.family.projected:
                outputs.pooler_output = self._model.multi_modal_projector(outputs.last_hidden_state)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise BadImage(f"the model's vision tower cannot compute an image: {error}") from error
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # its time is measured
        return ImageFeatures(
            self._joined(outputs.pooler_output),
            tuple(self._joined(one) for one in getattr(outputs, "deepstack_features", None) or ()),
        )

    def _states(self, aspect_ratio_mask: Tensor, **inputs: Tensor) -> Tensor:
        """What layers attend to: [tiles, states, hidden] of the tiles that are not padding."""
        found = self._model.vision_model(aspect_ratio_mask=aspect_ratio_mask, **inputs).last_hidden_state
        return self._model.multi_modal_projector(found[aspect_ratio_mask.bool()])

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, self._dtype if tensor.is_floating_point() else tensor.dtype)

    def _joined(self, features: Any) -> Tensor:
        """[n, hidden] of the features, of which transformers returns one or several tensors [..., hidden]."""
        parts = [features] if isinstance(features, Tensor) else features
        return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts]).to(self._dtype)


def load_tower(
    directory: Path,
    family: VisionFamily,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[str, int], None] = lambda stage, percent: None,
    kernels: CpuKernels | None = None,
) -> VisionTower:
    """Loads the vision part of a model directory. `kernels`: our CPU kernels, of this dtype, which compute what they
    can of it. Raises UserError if transformers cannot load it."""
    import transformers  # takes seconds

    progress("loading the vision tower", 90)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # its warnings tell of the decoder's weights, which are left out
    try:
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
        without_decoder(config.get_text_config())
        if getattr(config, "audio_config", None) is not None:
            config.audio_config = None  # its tower is not used
        vars(config).pop("quantization_config", None)  # of the decoder
        with Checkpoint(directory) as checkpoint:
            made = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
            weights = checkpoint.outside_text()
            _require_plain(directory, weights)
            model, report = made.from_pretrained(
                None,
                config=config,
                state_dict=weights,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # told below
            )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, AttributeError) as error:
        raise UserError(f"transformers cannot load the vision part of the model in {directory}: {error}") from error
    missing = sorted(name for name in report["missing_keys"] if not _of_decoder(name))
    if missing or report["mismatched_keys"]:
        names = missing or sorted(map(str, report["mismatched_keys"]))
        raise UserError(
            f"The weights in {directory} do not have the vision part that config.json asks for: {len(names)} tensors "
            f"are missing or have another shape, such as {names[0]}. Fetch the model again, or start with "
            "--media-workers 0, which serves it without images."
        )
    base = getattr(model, "model", model).eval().requires_grad_(False).to(device)
    tower = VisionTower(base, family, dtype, device)
    if kernels is not None:
        del weights
        replace_layers(base, kernels)
    return tower


def _require_plain(directory: Path, weights: dict[str, Tensor]) -> None:
    """Raises UserError if weights of the vision part are quantized, which transformers would take for plain ones."""
    for name, tensor in weights.items():
        if name.endswith(".weight") and tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise UserError(
                f"The vision part of the model in {directory} is quantized ({name} is {kind}), which is not served. "
                "Choose a model whose text part alone is quantized, or start with --media-workers 0, which serves it "
                "without images."
            )


def without_decoder(config: Any) -> None:
    """Makes the configuration of a text part one without layers and vocabulary, but with its width."""
    config.num_hidden_layers = 0
    config.vocab_size = 1
    config.pad_token_id = None
    if getattr(config, "layer_types", None):
        config.layer_types = []
    if getattr(config, "hidden_size_per_layer_input", None):
        config.hidden_size_per_layer_input = 0


def _of_decoder(name: str) -> bool:
    """Whether a parameter of a multimodal model of transformers belongs to its text part."""
    return any(part in ("language_model", "text_model", "lm_head") for part in name.split(".")[:2])
