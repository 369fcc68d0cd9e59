"""GPT-2 124M on random tokens, in plain PyTorch: 12 layers, 768 wide, 12 heads, 1024 tokens, 50,304 words.

autotune search examples/gpt2.py        finds how to train it fastest on this machine
python examples/gpt2.py                 trains it for a few steps as it stands
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model; the defaults are GPT-2 124M, with the vocabulary rounded up to a multiple of 64."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    context: int = 1024
    vocabulary: int = 50_304


class Attention(nn.Module):
    """Causal self-attention over several heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.project = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] to the same shape."""
        batch, tokens, width = x.shape
        query, key, value = (
            part.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    """Attention and a two-layer network, each added to what goes in, each behind a layer norm."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.feed_forward = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * config.width, config.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class GPT(nn.Module):
    """Token and position embeddings, the blocks, and a head that shares the token embedding's weight."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.token_embedding.weight
        self.apply(self._initialise)
        for name, parameter in self.named_parameters():
            # What is added to the residual stream starts smaller the deeper the model, as in the GPT-2 paper.
            if name.endswith(("attention.project.weight", "feed_forward.2.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * config.layers) ** 0.5)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [batch, tokens] to logits [batch, tokens, vocabulary]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x))


class RandomTokens(Dataset[tuple[Tensor, Tensor]]):
    """Windows into one long row of random tokens, each with the window one token further on as its target."""

    def __init__(self, windows: int, context: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(vocabulary, (windows * context + 1,), generator=generator)
        self.context = context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.context
        return self.tokens[start : start + self.context], self.tokens[start + 1 : start + 1 + self.context]


CONFIG = GPTConfig()


def model_fn() -> nn.Module:
    """A fresh model at every call."""
    return GPT(CONFIG)


def data_fn() -> Dataset[tuple[Tensor, Tensor]]:
    """A bare data set: the batch size is free."""
    return RandomTokens(4096, CONFIG.context, CONFIG.vocabulary)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy over all tokens of the batch."""
    tokens, targets = batch
    logits = model(tokens)
    return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))


def optimizer_fn(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW; matrices decay, vectors (biases and norms) do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95))


def main(steps: int = 5) -> None:
    """A plain training loop, without autotune."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model_fn().to(device)
    optimizer = optimizer_fn(model)
    loader = DataLoader(data_fn(), batch_size=4, shuffle=True)
    for step, (tokens, targets) in zip(range(1, steps + 1), loader, strict=False):
        loss = loss_fn(model, (tokens.to(device), targets.to(device)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
