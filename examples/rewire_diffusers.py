"""Give a diffusion Transformer of diffusers the two streams of SiameseNorm; denoise, save, load.

The weights are random: put DiTTransformer2DModel.from_pretrained(..., subfolder="transformer") in their place.
"""

import sys
from tempfile import TemporaryDirectory

import torch
from diffusers import DiTTransformer2DModel

from siamesenorm import from_pretrained, rewire

torch.manual_seed(0)
model = DiTTransformer2DModel(
    num_attention_heads=4, attention_head_dim=16, out_channels=8, num_layers=4, sample_size=16, num_embeds_ada_norm=10
).eval()
for parameter in model.parameters():  # AdaLN-Zero starts with gates at zero: any wiring would give the same
    torch.nn.init.normal_(parameter, std=0.1)
latents, condition = torch.randn(2, 4, 16, 16), {"timestep": torch.tensor([10, 900]), "class_labels": torch.arange(2)}


@torch.no_grad()
def denoise(model):
    return model(latents, **condition).sample


before = denoise(model)
report = rewire(model, "siamese")  # attention, MLP and AdaLN stay as they are
print(str(report).splitlines()[0])
after = denoise(model)
difference = ((after - before).abs().max() / before.abs().max()).item()
print(f"largest difference after rewiring, relative to the largest output: {difference:.1e}")

with TemporaryDirectory() as directory:
    model.save_pretrained(directory)
    loaded = from_pretrained(directory)
same = torch.equal(denoise(loaded), after)
print(f"saved, and loaded as {type(loaded).__name__}: {'bit-equal' if same else 'not the same'}")
sys.exit(not (difference < 1e-4 and same))
