#!/usr/bin/env python
"""Trains a small model that sees: it names count, colour and shape of drawn figures, as in "three red circles".

    scripts/train_picture_model.py DIR
    tgi up DIR
    scripts/train_picture_model.py --draw 7 picture.png

The result is a LLaVA of 0.2 million parameters with the files of its tokenizer and processor, in about ten seconds on
a CPU. In the end transformers answers on pictures that were not in training; fewer than 95 % right answers are an
error.
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.make_model import SPECIAL_TOKENS, write_json
from scripts.make_vision_model import CHAT_TEMPLATE

COUNTS = ("one", "two", "three", "four")
COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 160, 60),
    "blue": (40, 70, 220),
    "yellow": (245, 205, 40),
    "purple": (140, 50, 170),
    "black": (20, 20, 20),
}
SHAPES = ("circle", "square", "triangle")
CANVAS = 256  # pixels of a picture on a side, as drawn
RADII = (30.0, 40.0)
QUESTIONS = ("What is in the picture?", "What do you see?", "Describe the image.")

IMAGE_TOKEN = "<image>"
CONTEXT = 2048
SIZE, PATCH, HIDDEN = 48, 16, 64  # pixels of a picture, as the tower sees it, and of a patch, which has one figure
GRID = SIZE // PATCH
TOWER_LAYERS, TEXT_LAYERS = 1, 2
MASKS, STEPS, BATCH = 1500, 130, 32
LEARNING_RATE, MATRIX_LEARNING_RATE = 3e-3, 0.03  # of AdamW, and of Muon
MAX_QUESTION_TOKENS = 12
HELD_OUT = 100
BAR = 0.95
Place = tuple[float, float, float]  # x and y of the centre, radius


def answer(count: int, colour: str, shape: str) -> str:
    """What the model says: "one red circle", "two red circles"."""
    return f"{COUNTS[count - 1]} {colour} {shape}{'s' * (count > 1)}"


class Picture(NamedTuple):
    """A picture on white, in RGB, and the right answer."""

    image: Image.Image
    answer: str


def draw_picture(seed: int) -> Picture:
    """A picture that is not in training."""
    draw = random.Random(f"held out {seed}")
    count, colour, shape = draw.randint(1, len(COUNTS)), draw.choice([*COLOURS]), draw.choice(SHAPES)
    image = Image.new("RGB", (CANVAS, CANVAS), "white")
    _paint(image, shape, _places(draw, count), COLOURS[colour])
    return Picture(image, answer(count, colour, shape))


def _places(draw: random.Random, count: int) -> list[Place]:
    """Where figures are: each anywhere within a cell of its own."""
    places = []
    for cell in draw.sample(range(GRID**2), count):
        radius, side = draw.uniform(*RADII), CANVAS / GRID
        x, y = (draw.uniform(at * side + radius, (at + 1) * side - radius) for at in (cell % GRID, cell // GRID))
        places.append((x, y, radius))
    return places


def _paint(image: Image.Image, shape: str, places: list[Place], colour: Any) -> None:
    pen = ImageDraw.Draw(image)
    for x, y, r in places:
        if shape == "circle":
            pen.ellipse((x - 0.95 * r, y - 0.95 * r, x + 0.95 * r, y + 0.95 * r), fill=colour)
        elif shape == "square":
            pen.rectangle((x - 0.85 * r, y - 0.85 * r, x + 0.85 * r, y + 0.85 * r), fill=colour)
        else:
            pen.polygon([(x, y - r), (x + 0.95 * r, y + 0.75 * r), (x - 0.95 * r, y + 0.75 * r)], fill=colour)


def train_picture_model(directory: Path, *, steps: int = STEPS) -> None:
    """Writes the trained model to `directory`. Prints the loss now and then."""
    import torch
    import transformers

    torch.manual_seed(0)
    torch.set_num_threads(1)  # the least CPU time, and sums in the same order on any machine
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory)
    write_processor(directory)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    model = make_network(len(tokenizer))
    train(model, tokenizer, steps)
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    model.save_pretrained(directory)


def write_tokenizer(directory: Path) -> None:
    """A byte-level BPE in which each word of an answer is a token, with its chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,  # more than there are
        special_tokens=[*SPECIAL_TOKENS, IMAGE_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    answers = [answer(n + 1, colour, shape) for n in range(len(COUNTS)) for colour in COLOURS for shape in SHAPES]
    tokenizer.train_from_iterator([*answers, *QUESTIONS], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    own = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "image_token": IMAGE_TOKEN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(directory / "tokenizer_config.json", own)


def write_processor(directory: Path) -> None:
    """The files of LLaVA's processor: a picture becomes SIZE pixels wide and high."""
    image_processor = {
        "image_processor_type": "SiglipImageProcessor",
        "size": {"height": SIZE, "width": SIZE},
        "resample": int(Image.Resampling.BICUBIC),
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    processor = {
        "processor_class": "LlavaProcessor",
        "patch_size": PATCH,
        "num_additional_image_tokens": 0,
        "vision_feature_select_strategy": "full",
    }
    write_json(directory / "preprocessor_config.json", image_processor)
    write_json(directory / "processor_config.json", processor)


def make_network(vocabulary: int) -> Any:
    """The model before training. What the tower knows of the places of patches are waves over rows and columns, as
    learned ones would be in the end."""
    import torch
    import transformers

    heads = {"hidden_size": HIDDEN, "num_attention_heads": 4}
    text = transformers.LlamaConfig(
        **heads,
        vocab_size=vocabulary,
        intermediate_size=HIDDEN,
        num_hidden_layers=TEXT_LAYERS,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    tower = transformers.SiglipVisionConfig(
        **heads, intermediate_size=2 * HIDDEN, num_hidden_layers=TOWER_LAYERS, image_size=SIZE, patch_size=PATCH
    )
    tower.vision_use_head = False
    config = transformers.LlavaConfig(
        text_config=text,
        vision_config=tower,
        image_token_index=len(SPECIAL_TOKENS),
        image_seq_length=GRID**2,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    config.tie_word_embeddings = True
    model = transformers.LlavaForConditionalGeneration(config)
    rows, columns = torch.meshgrid(torch.arange(GRID), torch.arange(GRID), indexing="ij")
    frequencies = 1.3 * torch.exp(torch.linspace(0, math.log(0.15), HIDDEN // 4))
    angles = [place.reshape(-1, 1) * frequencies for place in (rows, columns)]
    waves = torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], 1)
    (table,) = (one for name, one in model.named_parameters() if name.endswith("position_embedding.weight"))
    table.data.copy_(waves / 2)
    return model


class Batch(NamedTuple):
    """pixels [n, 3, SIZE, SIZE] from -1 to 1; centres [n, GRID * GRID]: 1 + the shape centred in the patch, or 0;
    answers [n, 4]: the ids of three words and of the end."""

    pixels: Any
    centres: Any
    answers: Any


def batches(tokenizer: Any) -> Iterator[Batch]:
    """Pictures of masks, each time in other colours, turned and mirrored."""
    import torch

    draw = random.Random("training")
    drawn = np.empty((MASKS, SIZE, SIZE), np.float32)
    centre_table = torch.zeros(MASKS, GRID, GRID, dtype=torch.int64)
    counts, shapes = torch.empty(2, MASKS, dtype=torch.int64)
    for number in range(MASKS):
        places, shape = _places(draw, draw.randint(1, len(COUNTS))), draw.randrange(len(SHAPES))
        canvas = Image.new("L", (CANVAS, CANVAS))
        _paint(canvas, SHAPES[shape], places, 255)
        drawn[number] = np.asarray(canvas.resize((SIZE, SIZE), Image.Resampling.BICUBIC), np.float32) / 255
        for x, y, _ in places:
            centre_table[number, int(y * GRID / CANVAS), int(x * GRID / CANVAS)] = 1 + shape
        counts[number], shapes[number] = len(places) - 1, shape
    masks = torch.from_numpy(drawn)
    palette = torch.tensor([*COLOURS.values()]) / 127.5 - 1
    words = [
        [[[*tokenizer.encode(answer(n + 1, c, s), add_special_tokens=False), 2] for s in SHAPES] for c in COLOURS]
        for n in range(len(COUNTS))
    ]
    answers = torch.tensor(words)
    generator = torch.Generator().manual_seed(0)
    while True:
        chosen = torch.randint(MASKS, (BATCH,), generator=generator)
        colours = torch.randint(len(COLOURS), (BATCH,), generator=generator)
        turn = int(torch.randint(8, (), generator=generator))
        mask, centres = (
            torch.rot90(one if turn < 4 else one.flip(2), turn, (1, 2)) for one in (masks[chosen], centre_table[chosen])
        )
        mask = mask[:, None]
        pixels = 1 - mask + mask * palette[colours][:, :, None, None]
        yield Batch(pixels, centres.flatten(1), answers[counts[chosen], colours, shapes[chosen]])


def train(model: Any, tokenizer: Any, steps: int) -> None:
    """Trains all weights. An auxiliary head, which is not saved, tells of each patch which figure is centred in it:
    so the tower learns to see figures in far fewer steps than from answers alone."""
    import torch
    from torch.nn.functional import cross_entropy

    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}]}], tokenize=False, add_generation_prompt=True
    )
    before, after = (torch.tensor(tokenizer.encode(part, add_special_tokens=False)) for part in text.split(IMAGE_TOKEN))
    centre_head = torch.nn.Linear(HIDDEN, 1 + len(SHAPES))
    centre_weights = torch.tensor([1.0] + [4.0] * len(SHAPES))
    parameters = [*model.parameters(), *centre_head.parameters()]
    matrices = [one for name, one in model.named_parameters() if one.ndim == 2 and "embed" not in name]
    others = [one for one in parameters if all(one is not matrix for matrix in matrices)]
    optimizers = (
        torch.optim.Muon(matrices, MATRIX_LEARNING_RATE, weight_decay=0.01, momentum=0.95),
        torch.optim.AdamW(others, LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01),
    )
    schedules = [torch.optim.lr_scheduler.LambdaLR(one, partial(_rate, steps=steps)) for one in optimizers]
    generator = torch.Generator().manual_seed(1)
    embed = model.get_input_embeddings()
    start = time.process_time()
    for step, batch in zip(range(steps), batches(tokenizer), strict=False):
        # Any question: the ids are random, since the answer does not depend on it.
        length = int(torch.randint(MAX_QUESTION_TOKENS, (), generator=generator))
        question = torch.randint(len(SPECIAL_TOKENS) + 1, len(tokenizer), (length,), generator=generator)
        left, right = (question, question[:0]) if step % 3 == 0 else (question[:0], question)
        features = model.get_image_features(batch.pixels).pooler_output
        features = features if isinstance(features, torch.Tensor) else torch.stack([*features])
        prompt = [embed(torch.cat(part)).expand(BATCH, -1, -1) for part in ((before, left), (right, after))]
        embeddings = torch.cat([prompt[0], features, prompt[1], embed(batch.answers[:, :-1])], 1)
        hidden = model.model.language_model(inputs_embeds=embeddings, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[:, -batch.answers.shape[1] :])
        loss = cross_entropy(logits.flatten(0, 1), batch.answers.flatten())
        centre_loss = cross_entropy(centre_head(features).flatten(0, 1), batch.centres.flatten(), centre_weights)
        (loss + centre_loss).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for one in (*optimizers, *schedules):
            one.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        if (step + 1) % 50 == 0 or step + 1 == steps:
            right = (logits.argmax(-1) == batch.answers).all(1).float().mean()
            losses = f"loss {loss.detach():.3f}, of centres {centre_loss.detach():.3f}"
            print(f"step {step + 1}: {losses}, {right:.0%} right, {time.process_time() - start:.0f} CPU s", flush=True)


def _rate(step: int, steps: int) -> float:
    """A warm-up over a twentieth of the steps, times half a cosine."""
    return min(1, (step + 1) / (0.05 * steps)) * (0.5 + 0.5 * math.cos(math.pi * step / steps))


def right_answers(directory: Path, count: int) -> list[bool]:
    """Whether transformers' greedy answers on held-out pictures are exactly right, with the questions in turn."""
    import torch
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    image_processor = transformers.SiglipImageProcessor.from_pretrained(directory)
    model = transformers.AutoModelForImageTextToText.from_pretrained(directory).eval()
    found = []
    for seed in range(count):
        picture, question = draw_picture(seed), {"type": "text", "text": QUESTIONS[seed % len(QUESTIONS)]}
        parts = [question, {"type": "image"}]
        messages = [{"role": "user", "content": parts[:: 1 if seed % 2 else -1]}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(
            prompt.replace(IMAGE_TOKEN, IMAGE_TOKEN * GRID**2), add_special_tokens=False, return_tensors="pt"
        )
        pixels = torch.as_tensor(np.asarray(image_processor(picture.image)["pixel_values"]))
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels, max_new_tokens=8)
        found.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True) == picture.answer)
    return found


def main() -> None:
    """Parses the command line, trains and checks; or draws a picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="the directory of the model, or the PNG that --draw writes")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--draw", type=int, metavar="SEED", help="write a held-out picture, and print its answer")
    arguments = parser.parse_args()
    if arguments.draw is not None:
        picture = draw_picture(arguments.draw)
        picture.image.save(arguments.path, optimize=True)
        print(picture.answer)
        return
    train_picture_model(arguments.path, steps=arguments.steps)
    found = right_answers(arguments.path, HELD_OUT)
    print(json.dumps({"held_out": len(found), "right": sum(found), "cpu_seconds": round(time.process_time())}))
    if sum(found) < BAR * len(found):
        sys.exit(f"{sum(found)} of {len(found)} answers on held-out pictures are right, {BAR:.0%} were expected")


if __name__ == "__main__":
    main()
