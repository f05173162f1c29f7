"""Training of the demo models: batches, optimisers, schedule, evaluation, samples."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from demo_corpus import Document
from demo_model import END_OF_TEXT, Decoder

WARMUP_SHARE = 0.02
EVALUATIONS = 20
LOG_EVERY = 20


@dataclass(frozen=True)
class Recipe:
    """How one model is trained. `steps`, where given, replaces the time budget `seconds`."""

    seconds: float
    steps: int | None = None
    batch_tokens: int = 131072
    context: int = 2048
    matrix_lr: float = 4e-3
    vector_lr: float = 4e-3
    weight_decay: float = 0.1
    seed: int = 1234
    compile: bool = False


@dataclass(frozen=True)
class Tokens:
    """A token stream on the training device, with the bytes of text it stands for."""

    ids: Tensor
    text_bytes: int
    documents: int


@dataclass
class History:
    """What a training run did; losses are nats a token."""

    steps: int = 0
    tokens_seen: int = 0
    seconds: float = 0.0
    best_step: int = 0
    evaluations: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Evaluation:
    """Loss on held-out files in nats a token, and in bits a byte of their text."""

    loss: float
    bits_per_byte: float


def encode(documents: list[Document], tokenizer: Tokenizer, device: torch.device) -> Tokens:
    """All documents in one stream, each begun and the last one ended by END_OF_TEXT."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert end is not None
    stream: list[int] = []
    for encoding in tokenizer.encode_batch([d.text for d in documents]):
        stream.append(end)
        stream.extend(encoding.ids)
    stream.append(end)
    ids = torch.tensor(stream, dtype=torch.int32).to(device)
    return Tokens(ids, sum(len(d.text.encode()) for d in documents), len(documents))


def crops(tokens: Tokens, count: int, length: int, generator: torch.Generator) -> Tensor:
    """`count` random windows of length + 1 tokens, int64 [count, length + 1]."""
    ids = tokens.ids
    last = len(ids) - length - 1
    if last < 0:
        raise ValueError(f"context: expected under {len(ids)} tokens of text, got {length}")
    begin = torch.randint(last + 1, (count, 1), device=ids.device, generator=generator)
    return ids[begin + torch.arange(length + 1, device=ids.device)].long()


def precision(device: torch.device) -> torch.autocast:
    """bf16 matrix products on a GPU, fp32 on a CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


@torch.no_grad()
def evaluate(
    model: nn.Module, tokens: Tokens, context: int, limit: int | None = None
) -> Evaluation:
    """Mean loss over disjoint windows of the stream, or of its first `limit` tokens."""
    was_training = model.training
    model.eval()
    total, counted = 0.0, 0
    ids = tokens.ids[: limit + 1 if limit else None].long()
    rows = max(1, 65536 // context)
    with precision(ids.device):
        for begin in range(0, len(ids) - 1, rows * context):
            piece = ids[begin : begin + rows * context + 1]
            full = (len(piece) - 1) // context * context
            # The odd tail is a window of its own, so every token but the first counts once.
            for low, high in ((0, full), (full, len(piece) - 1)):
                if low == high:
                    continue
                width = min(context, high - low)
                logits = model(piece[low:high].view(-1, width))
                target = piece[low + 1 : high + 1]
                total += F.cross_entropy(
                    logits.flatten(0, 1).float(), target, reduction="sum"
                ).item()
                counted += high - low
    model.train(was_training)
    loss = total / counted
    tokens_per_byte = len(tokens.ids) / tokens.text_bytes
    return Evaluation(loss, loss / math.log(2) * tokens_per_byte)


@torch.no_grad()
def agreement(draft: Decoder, target: Decoder, tokens: Tokens, context: int) -> dict[str, float]:
    """How a target takes its draft's tokens on held-out text: what speculation can gain.

    `greedy`: share of positions with the same most likely token. `acceptance`: expected share of
    the draft's samples at temperature 1 that the target accepts, the mean of sum min(p, q).
    """
    draft.eval()
    target.eval()
    rows = min(32, (len(tokens.ids) - 1) // context)
    batch = tokens.ids[: rows * context].long().view(rows, context)
    same, accepted = 0.0, 0.0
    with precision(batch.device):
        for row in batch.split(4):
            p, q = target(row).float(), draft(row).float()
            same += (p.argmax(-1) == q.argmax(-1)).sum().item()
            accepted += torch.minimum(p.softmax(-1), q.softmax(-1)).sum().item()
    return {"greedy": same / batch.numel(), "acceptance": accepted / batch.numel()}


def optimizers_of(model: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers; AdamW for the embedding and the norms."""
    matrices: list[nn.Parameter] = []
    embeddings: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name:
            embeddings.append(parameter)
        else:
            (matrices if parameter.ndim == 2 else vectors).append(parameter)
    muon = torch.optim.Muon(
        matrices,
        lr=recipe.matrix_lr,
        weight_decay=recipe.weight_decay,
        momentum=0.95,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(
        [
            {"params": embeddings, "weight_decay": recipe.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=recipe.vector_lr,
        betas=(0.9, 0.95),
        fused=matrices[0].is_cuda,
    )
    for group in [*muon.param_groups, *adamw.param_groups]:
        group["peak_lr"] = group["lr"]
    return [muon, adamw]


def rate(progress: float) -> float:
    """The schedule: a short linear warm-up, then a cosine to zero, over progress 0 to 1."""
    if progress < WARMUP_SHARE:
        return max(progress, 1e-4) / WARMUP_SHARE
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - WARMUP_SHARE) / (1 - WARMUP_SHARE))))


def batch_loss(
    model: Callable[[Tensor], Tensor], teacher: nn.Module | None, batch: Tensor
) -> Tensor:
    """Cross-entropy with the text, or with the teacher's distribution over the vocabulary."""
    logits = model(batch[:, :-1]).flatten(0, 1)
    if teacher is None:
        return F.cross_entropy(logits.float(), batch[:, 1:].flatten())
    with torch.no_grad():
        wanted = teacher(batch[:, :-1]).flatten(0, 1).float().softmax(-1)
    return F.cross_entropy(logits.float(), wanted)


def fit(
    model: Decoder,
    train: Tokens,
    held_out: Tokens,
    recipe: Recipe,
    *,
    teacher: Decoder | None = None,
    evaluation_tokens: int | None = None,
    log: Callable[[str], None] = print,
) -> History:
    """Train in place and leave the weights that were best on the held-out files.

    The schedule runs over elapsed time, so a run ends when its seconds are spent whatever the
    machine does; with `steps` it runs over steps and can be repeated exactly.
    """
    device = train.ids.device
    generator = torch.Generator(device).manual_seed(recipe.seed)
    stepped = torch.compile(model) if recipe.compile else model
    optimizers = optimizers_of(model, recipe)
    if teacher is not None:
        teacher.eval()
    model.train()
    rows = max(1, recipe.batch_tokens // recipe.context)
    history = History()
    best_loss, best = math.inf, {}
    begin = time.perf_counter()
    next_evaluation = 1 / EVALUATIONS
    progress = 0.0
    while progress < 1:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * rate(progress)
        batch = crops(train, rows, recipe.context, generator)
        with precision(device):
            loss = batch_loss(stepped, teacher, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        history.steps += 1
        history.tokens_seen += rows * recipe.context
        if recipe.steps is None and history.steps % LOG_EVERY == 0:
            loss.item()  # Waits for the GPU, so that elapsed time is time worked.
        history.seconds = time.perf_counter() - begin
        progress = (
            history.steps / recipe.steps if recipe.steps else history.seconds / recipe.seconds
        )
        if progress >= next_evaluation or progress >= 1:
            next_evaluation += 1 / EVALUATIONS
            measured = evaluate(model, held_out, recipe.context, evaluation_tokens)
            if measured.loss < best_loss:
                best_loss, history.best_step = measured.loss, history.steps
                best = {k: v.detach().clone() for k, v in model.state_dict().items()}
            entry = {"step": history.steps, "train": loss.item(), "held_out": measured.loss}
            history.evaluations.append(entry)
            history.seconds = time.perf_counter() - begin
            log(
                f"{100 * min(1.0, progress):5.1f}%  step {history.steps}  train {loss.item():.4f}  "
                f"held-out {measured.loss:.4f}  {history.seconds:.1f} s  "
                f"{history.tokens_seen / history.seconds:,.0f} tokens/s"
            )
    model.load_state_dict(best)
    model.eval()
    return history


@torch.no_grad()
def sample(model: Decoder, tokenizer: Tokenizer, prompt: str, length: int, seed: int) -> str:
    """Continue a prompt at temperature 0.8 within the 40 most likely tokens."""
    device = model.model.embed_tokens.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    end = tokenizer.token_to_id(END_OF_TEXT)
    ids = torch.tensor([[end, *tokenizer.encode(prompt).ids]], device=device)
    model.eval()
    for _ in range(length):
        with precision(device):
            logits = model(ids[:, -model.config.max_position_embeddings :])[:, -1].float()
        top, candidates = logits.topk(min(40, logits.shape[-1]))
        choice = torch.multinomial((top / 0.8).softmax(-1), 1, generator=generator)
        token = candidates.gather(-1, choice)
        if token.item() == end:
            break
        ids = torch.cat((ids, token), dim=1)
    return tokenizer.decode(ids[0, 1:].tolist())
