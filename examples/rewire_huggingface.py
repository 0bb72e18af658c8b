"""Give a language model of Hugging Face the two streams of SiameseNorm; compare, generate, save, load.

The weights are random: put AutoModelForCausalLM.from_pretrained(...) in their place.
"""

import sys
from tempfile import TemporaryDirectory

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import siamesenorm

torch.manual_seed(0)
config = LlamaConfig(hidden_size=64, intermediate_size=176, num_hidden_layers=4, num_attention_heads=4, vocab_size=128)
model = LlamaForCausalLM(config).eval()
for parameter in model.parameters():  # gains too: a fresh model's are all 1
    torch.nn.init.normal_(parameter, std=0.2)
tokens = torch.randint(3, 128, (2, 12))


@torch.no_grad()
def logits(model):
    return model(tokens).logits


def continued(model):
    return model.generate(tokens, max_new_tokens=16, do_sample=False, pad_token_id=0)


before, text = logits(model), continued(model)
report = siamesenorm.rewire(model, "siamese")  # attention, MLP, cache and the names of their weights stay
print("\n".join(str(report).splitlines()[:4]), "\n...")
after = logits(model)
difference = ((after - before).abs().max() / before.abs().max()).item()
print(f"largest difference of logits, relative to the largest logit: {difference:.1e}")
same_text = torch.equal(continued(model), text)
print(f"greedy generation with cache: {'the same tokens' if same_text else 'other tokens'}")

model(tokens, labels=tokens).loss.backward()
silent = [parameter for parameter in model.parameters() if not parameter.any()]
awake = sum(bool(parameter.grad.any()) for parameter in silent)
print(f"{awake} of the {len(silent)} gains that start at zero get a gradient")

with TemporaryDirectory() as directory:
    model.save_pretrained(directory)
    loaded = siamesenorm.from_pretrained(directory)
same = torch.equal(logits(loaded), after)
print(f"saved, and loaded as {type(loaded).__name__}: {'bit-equal' if same else 'not the same'}")
sys.exit(not (difference < 1e-4 and same_text and awake == len(silent) and same))
