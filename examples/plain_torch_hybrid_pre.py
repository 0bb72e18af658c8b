"""SiameseNorm Hybrid-Pre (arXiv 2602.08064), the paper's main form, in plain torch: paste the two classes anywhere.

Open with X = Y = embedding. The attention must normalise its queries, keys and values per head (QKV-norm). Keep gains
and gates out of weight decay, and both streams in one dtype, fp32 or bf16.
"""

import sys

import torch
from torch import nn
from torch.nn.functional import rms_norm


class HybridPreBlock(nn.Module):
    def __init__(self, index, dim, attention, mlp, eps=1e-5):
        super().__init__()
        self.attention, self.mlp, self.scale = attention, mlp, (2 * (index + 1)) ** -0.5
        self.gate = nn.Parameter(torch.ones(dim))
        norms = (nn.RMSNorm(dim, eps) for _ in range(4))
        self.attention_norm, self.bounded_norm, self.mlp_norm, self.input_norm = norms

    def forward(self, x, y):
        output = self.attention(self.gate * x + self.attention_norm(y))
        x, y = self.bounded_norm(x + self.scale * output), y + output
        output = self.mlp(self.input_norm(x + self.mlp_norm(y)))
        return x + self.scale * output, y + output


class HybridPreClosing(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.bounded_norm, self.identity_norm, self.output_norm = (nn.RMSNorm(dim, eps) for _ in range(3))

    def forward(self, x, y):
        return self.output_norm(self.bounded_norm(x) + self.identity_norm(y))


if __name__ == "__main__":  # with X silenced, it is Pre-Norm
    torch.manual_seed(0)
    blocks = [HybridPreBlock(index, 64, nn.Linear(64, 64), nn.Linear(64, 64)) for index in range(4)]
    closing = HybridPreClosing(64)
    for gain in [closing.bounded_norm.weight, *(g for b in blocks for g in (b.gate, b.bounded_norm.weight))]:
        nn.init.zeros_(gain)
    x = y = h = torch.randn(2, 16, 64)
    for block in blocks:
        x, y = block(x, y)
        h = h + block.attention(rms_norm(h, [64], eps=1e-5))
        h = h + block.mlp(rms_norm(h, [64], eps=1e-5))
    difference = (closing(x, y) - rms_norm(h, [64], eps=1e-5)).abs().max().item()
    print(f"zero gate and zero gains on X: {difference:.1e} from Pre-Norm at most")
    sys.exit(not difference < 1e-4)
