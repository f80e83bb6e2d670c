"""A small GPT over bytes: pre-norm blocks, dropout, the embedding shared with the output.

A model as anyone would write it: plain torch, nothing in it knows that its replicas may die. Bytes are the vocabulary,
so there is no tokenizer to ship and any file is training text.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Config:
    vocabulary: int = 256
    block: int = 64         # longest sequence, in bytes
    layers: int = 2
    heads: int = 4
    width: int = 128
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width={self.width} must be a multiple of heads={self.heads}")


class Attention(nn.Module):
    """Causal self-attention: [batch, time, width] -> the same."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (part.view(batch, time, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """Next-byte logits: int64 [batch, time] -> float32 [batch, time, vocabulary]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.bytes = nn.Embedding(config.vocabulary, config.width)
        self.places = nn.Embedding(config.block, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(self._initialise)
        for block in self.blocks:       # what is added to the residual stream starts small, the more so the deeper
            for last in (block.attention.out, block.mlp[2]):
                nn.init.normal_(last.weight, std=0.02 / (2 * config.layers) ** 0.5)
        self.head.weight = self.bytes.weight

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        time = x.shape[1]
        if time > self.config.block:
            raise ValueError(f"a sequence of {time} bytes does not fit block={self.config.block}")
        h = self.dropout(self.bytes(x) + self.places(torch.arange(time, device=x.device)))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def loss_fn(logits: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte: [batch, time, vocabulary], int64 [batch, time] -> scalar."""
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())
