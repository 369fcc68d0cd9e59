"""Small models with the module structure of well-known ones, each with a batch and a loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, 2, width // 2).transpose(1, 2) for part in self.c_attn(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(batch, length, width))


class GptBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    """Token and position embeddings, blocks, and a head that shares the embedding's weight."""

    def __init__(self, width: int = 16, depth: int = 4, vocabulary: int = 50) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(32, width)
        self.h = nn.ModuleList([GptBlock(width) for _ in range(depth)])
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class BertSelfAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor]:
        scores = self.query(x) @ self.key(x).transpose(1, 2) / x.shape[-1] ** 0.5
        return (self.dropout(scores.softmax(-1)) @ self.value(x),)


class BertOutput(nn.Module):
    def __init__(self, inner: int, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inner, width)
        self.LayerNorm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, skipped: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(self.dropout(self.dense(x)) + skipped)


class BertAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.self = BertSelfAttention(width)
        self.output = BertOutput(width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor]:
        return (self.output(self.self(x, mask)[0], x),)


class BertLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = BertAttention(width)
        self.intermediate = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU())
        self.output = BertOutput(4 * width, width)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None) -> tuple[torch.Tensor]:
        attended = self.attention(hidden_states, attention_mask)[0]
        return (self.output(self.intermediate(attended), attended),)


class BertEncoder(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layer = nn.ModuleList([BertLayer(width) for _ in range(depth)])

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        for layer in self.layer:
            hidden_states = layer(hidden_states=hidden_states, attention_mask=None)[0]
        return hidden_states


class Bert(nn.Module):
    """Layers that hold attentions that hold self-attentions, and take and give what Hugging Face's do."""

    def __init__(self, width: int = 16, depth: int = 3, vocabulary: int = 50) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(vocabulary, width)
        self.encoder = BertEncoder(width, depth)
        self.cls = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.cls(self.encoder(self.embeddings(tokens)))


class VitBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Vit(nn.Module):
    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.Sequential(*[VitBlock(width) for _ in range(depth)])
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.patch_embed(images).flatten(2).transpose(1, 2)).mean(1))


class BasicBlock(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.downsample: nn.Module | None = None
        if stride != 1:
            self.downsample = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skipped = x if self.downsample is None else self.downsample(x)
        return torch.relu(self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))) + skipped)


class ResNet(nn.Module):
    """Three stages, each a Sequential of three blocks; a downsampling block holds a Sequential of its own."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1)
        self.layer1 = nn.Sequential(*[BasicBlock(width, width, 1) for _ in range(3)])
        self.layer2 = nn.Sequential(
            BasicBlock(width, 2 * width, 2), *[BasicBlock(2 * width, 2 * width, 1) for _ in range(2)]
        )
        self.layer3 = nn.Sequential(
            BasicBlock(2 * width, 4 * width, 2), *[BasicBlock(4 * width, 4 * width, 1) for _ in range(2)]
        )
        self.fc = nn.Linear(4 * width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.fc(self.layer3(self.layer2(self.layer1(self.conv1(images)))).mean((2, 3)))


class DoubleConv(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(),
            nn.Conv2d(outer, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class UNet(nn.Module):
    """Blocks as attributes, in no ModuleList, with skips between them."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down1 = DoubleConv(3, width)
        self.down2 = DoubleConv(width, 2 * width)
        self.bottom = DoubleConv(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.merge2 = DoubleConv(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.merge1 = DoubleConv(2 * width, width)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        lowest = self.bottom(F.max_pool2d(second, 2))
        x = self.merge2(torch.cat([self.up2(lowest), second], 1))
        return self.out(self.merge1(torch.cat([self.up1(x), first], 1)))


def tokens(batch_size: int = 2) -> torch.Tensor:
    return torch.randint(0, 50, (batch_size, 12), generator=torch.Generator().manual_seed(0))


def images(batch_size: int = 2) -> torch.Tensor:
    return torch.randn(batch_size, 3, 16, 16, generator=torch.Generator().manual_seed(0))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "gpt": (Gpt, tokens),
    "bert": (Bert, tokens),
    "vit": (Vit, images),
    "resnet": (ResNet, images),
    "unet": (UNet, images),
}
"""Name to (makes the model, makes a batch)."""


def square_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A loss that any of the models can be trained on."""
    return model(batch).square().mean()
