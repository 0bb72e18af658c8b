"""SiameseNorm Post-Pre (arXiv 2602.08064) in plain torch, around any attention and MLP: paste the two classes anywhere.

Open with X = Y = embedding. Keep gains out of weight decay, and both streams in one dtype, fp32 or bf16.
"""

import sys

import torch
from torch import nn
from torch.nn.functional import rms_norm


class PostPreBlock(nn.Module):
    def __init__(self, index, dim, attention, mlp, eps=1e-5):
        super().__init__()
        self.sublayers, self.scale = nn.ModuleList([attention, mlp]), (2 * (index + 1)) ** -0.5
        self.identity_norms, self.input_norms, self.bounded_norms = (
            nn.ModuleList(nn.RMSNorm(dim, eps) for _ in self.sublayers) for _ in range(3)
        )

    def forward(self, x, y):
        norms = zip(self.identity_norms, self.input_norms, self.bounded_norms, strict=True)
        for sublayer, (identity_norm, input_norm, bounded_norm) in zip(self.sublayers, norms, strict=True):
            output = sublayer(input_norm(x + identity_norm(y)))
            x, y = bounded_norm(x + self.scale * output), y + output
        return x, y


class PostPreClosing(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.identity_norm = nn.RMSNorm(dim, eps)

    def forward(self, x, y):
        return x + self.identity_norm(y)


if __name__ == "__main__":  # with X silenced from the start, it is Pre-Norm
    torch.manual_seed(0)
    blocks = [PostPreBlock(index, 64, nn.Linear(64, 64), nn.Linear(64, 64)) for index in range(4)]
    closing = PostPreClosing(64)
    for norm in (norm for block in blocks for norm in block.bounded_norms):
        nn.init.zeros_(norm.weight)
    y = h = torch.randn(2, 16, 64)
    x = torch.zeros_like(y)
    for block in blocks:
        x, y = block(x, y)
        for sublayer in block.sublayers:
            h = h + sublayer(rms_norm(h, [64], eps=1e-5))
    difference = (closing(x, y) - rms_norm(h, [64], eps=1e-5)).abs().max().item()
    print(f"zero start and zero gains on X: {difference:.1e} from Pre-Norm at most")
    sys.exit(not difference < 1e-4)
