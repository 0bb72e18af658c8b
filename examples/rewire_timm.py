"""Give a Vision Transformer of timm the two streams of SiameseNorm; classify, extract features, save, load.

The weights are random: create the model with pretrained=True to convert a trained one.
"""

import sys
from tempfile import TemporaryDirectory

import timm
import torch

from siamesenorm import rewire
from siamesenorm.interop import timm as siamese_timm

torch.manual_seed(0)
model = timm.create_model("deit_tiny_patch16_224", img_size=64, depth=4, num_classes=10, init_values=0.1).eval()
for parameter in model.parameters():  # away from the initial values, at which most gains are 1
    torch.nn.init.normal_(parameter, std=0.1)
images = torch.randn(2, 3, 64, 64)


@torch.no_grad()
def logits(model):
    return model(images)


before = logits(model)
report = rewire(model, "siamese-post-pre")  # LayerScale and drop-path stay, in the sublayers that they belong to
print(str(report).splitlines()[0])
after = logits(model)
difference = ((after - before).abs().max() / before.abs().max()).item()
print(f"largest difference of logits after rewiring, relative to the largest logit: {difference:.1e}")

features = model.forward_intermediates(images, indices=[1, 3], intermediates_only=True)
print(
    f"features of blocks 1 and 3: {', '.join(str(list(feature.shape)) for feature in features)}, one stream's channels"
)

with TemporaryDirectory() as directory:
    siamese_timm.save_pretrained(model, directory)
    loaded = timm.create_model(f"local-dir:{directory}", pretrained=True).eval()
same = torch.equal(logits(loaded), after)
print(f"saved, and loaded by timm.create_model: {'bit-equal' if same else 'not the same'}")

scratch = timm.create_model("siamesenorm_deit_tiny_patch16_224", topology="siamese-post-pre", img_size=64, depth=4)
print(f"from scratch, by name: {len(scratch.blocks)} blocks around {type(scratch.norm.closing).__name__}")
sys.exit(not (difference < 1e-3 and same and features[0].shape[1] == model.embed_dim))
