"""Train a rewired model with the Trainer of Hugging Face, and watch its second stream wake up.

The optimizer is built here: the Trainer's own would let weight decay pull SiameseNorm's gains back to Pre-Norm.
"""

import sys
from tempfile import TemporaryDirectory

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

import siamesenorm
from siamesenorm.analysis.stream_monitor import StreamMonitor
from siamesenorm.interop.callbacks import StreamMonitorCallback
from siamesenorm.training.config import OptimizerConfig
from siamesenorm.training.optimizer import build_optimizers

torch.manual_seed(0)
config = LlamaConfig(hidden_size=32, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, vocab_size=32)
model = LlamaForCausalLM(config)
siamesenorm.rewire(model, "siamese")

texts = (torch.arange(16) * step + start for step in range(1, 5) for start in range(32))  # counting on by 1, 2, 3, 4
dataset = [{"input_ids": text % 32, "labels": text % 32} for text in texts]
(optimizer,) = build_optimizers(model, OptimizerConfig(learning_rate=1e-2, weight_decay=0.1))
monitor = StreamMonitor(model, every=10)

with TemporaryDirectory() as directory:
    arguments = TrainingArguments(
        directory, max_steps=30, per_device_train_batch_size=8, logging_steps=1, logging_nan_inf_filter=False,
        report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=dataset, optimizers=(optimizer, None))
    trainer.add_callback(StreamMonitorCallback(monitor, stop_when_lost=True))
    trainer.remove_callback(PrinterCallback)
    trainer.train()

measured = [line for line in monitor.records if line["kind"] == "streams"]
for line in measured:
    sizes = ", ".join(f"{name} {stream['rms']:.3f}" for name, stream in line["end"].items())
    print(f"step {line['step']:>2}: RMS of the streams after the last block: {sizes}")
verdict = monitor.verdict()
print(verdict.sentence())
bounded = [line["end"]["bounded"]["rms"] for line in measured]
sys.exit(not (verdict.label == "stable" and bounded[-1] > 2 * bounded[0]))
