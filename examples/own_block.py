"""Two lines in your own block: a hand-written Transformer with any residual topology, trained on a few lines of text.

python examples/own_block.py [TOPOLOGY]
"""

import math
import sys

import torch
from torch import nn
from torch.nn import functional as F

from siamesenorm import ResidualSpec, build_topology, transformer_places

TEXT = b"the norm that follows an addition belongs to the next reader, and the streams belong to no one. " * 40
DIM, DEPTH, HEADS, CONTEXT, STEPS = 64, 2, 4, 32, 60


class Block(nn.Module):
    def __init__(self, attention_connection, mlp_connection, normalise_heads):
        super().__init__()
        self.attention_connection, self.mlp_connection = attention_connection, mlp_connection
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
        head_norms = (nn.RMSNorm(DIM // HEADS, 1e-5) if normalise_heads else nn.Identity() for _ in range(3))
        self.head_norms = nn.ModuleList(head_norms)

    def attention(self, h):
        heads = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(h).chunk(3, dim=-1))
        q, k, v = (norm(part) for norm, part in zip(self.head_norms, heads, strict=True))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def forward(self, streams):
        h, streams = self.attention_connection.read(streams)  # was: h = self.norm1(x)
        streams = self.attention_connection.write(streams, self.attention(h))  # was: x = x + self.attention(h)
        h, streams = self.mlp_connection.read(streams)
        return self.mlp_connection.write(streams, self.mlp(h))


torch.manual_seed(0)
topology, spec = build_topology(sys.argv[1] if len(sys.argv) > 1 else "siamese"), ResidualSpec(dim=DIM)
places, qkv_norm = transformer_places(DEPTH), topology.attention_norm == "qkv-head"
blocks = (Block(*(topology.connection(place, spec) for place in pair), qkv_norm) for pair in places)
closing = topology.closing(places[-1][-1], spec)  # owns every final norm
stack = nn.Sequential(topology.opening(spec), *blocks, closing)
model = nn.Sequential(nn.Embedding(256, DIM), stack, nn.Linear(DIM, 256, bias=False))

text = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long()
unigram = -sum(p * math.log(p) for p in (text.bincount() / len(text)).tolist() if p)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
for _ in range(STEPS):
    windows = text.unfold(0, CONTEXT + 1, 1)[torch.randint(len(text) - CONTEXT, (16,))]
    loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"{topology.title}: loss {loss.item():.2f} nats after {STEPS} steps; the text's unigram entropy is {unigram:.2f}")
sys.exit(not loss.item() < unigram / 2)
