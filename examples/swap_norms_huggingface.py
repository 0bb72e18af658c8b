"""Replace RMSNorm by SeeDNorm in a language model of Hugging Face, keeping its function; let it learn, save, load.

SeeDNorm starts at beta = 0, where it is RMSNorm, and from there learns how much each token's own size matters.
"""

import sys
from tempfile import TemporaryDirectory

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import siamesenorm
from siamesenorm.norms import SeeDNorm

torch.manual_seed(0)
config = LlamaConfig(hidden_size=64, intermediate_size=176, num_hidden_layers=4, num_attention_heads=4, vocab_size=128)
model = LlamaForCausalLM(config)
for parameter in model.parameters():  # gains too: a fresh model's are all 1
    torch.nn.init.normal_(parameter, std=0.2)
tokens = torch.randint(128, (4, 32))


@torch.no_grad()
def logits(model):
    return model(tokens).logits


before = logits(model)
report = siamesenorm.swap_norms(model, "seednorm")
print("\n".join(str(report).splitlines()[:4]), "\n...")
difference = (logits(model) - before).abs().max().item()
print(f"{len(report.replaced)} norms replaced; largest difference of logits: {difference:.1e}")

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for _ in range(10):
    loss = model(tokens, labels=tokens).loss
    losses.append(loss.item())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
moved = sum(bool(module.beta.any()) for module in model.modules() if isinstance(module, SeeDNorm))
print(f"after {len(losses)} steps {moved} norms have left RMSNorm; loss {losses[0]:.2f} -> {losses[-1]:.2f}")

with TemporaryDirectory() as directory:
    model.save_pretrained(directory)
    same = torch.equal(logits(siamesenorm.from_pretrained(directory)), logits(model.eval()))
print(f"saved and loaded: {'bit-equal' if same else 'not the same'}")
kept = report.function_kept and difference < 1e-4
sys.exit(not (kept and moved == len(report.replaced) and losses[-1] < losses[0] and same))
