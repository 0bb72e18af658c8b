"""The task diffusion: its loss, its draws, its latents, its samples, and its runs."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

diffusers = pytest.importorskip("diffusers")

from siamesenorm.data import latents as latents_module  # noqa: E402
from siamesenorm.data.images import open_images  # noqa: E402
from siamesenorm.data.latents import Autoencoder, scaled_pixels  # noqa: E402
from siamesenorm.errors import UserError  # noqa: E402
from siamesenorm.models.vision import OFFICIAL  # noqa: E402
from siamesenorm.tasks import available_tasks, diffusion, task_from_json  # noqa: E402
from siamesenorm.tasks.diffusion import DiffusionTask, DiffusionTaskConfig  # noqa: E402
from siamesenorm.tasks.diffusion_process import DiffusionProcess, level_log_likelihood  # noqa: E402
from siamesenorm.tasks.diffusion_samples import guided  # noqa: E402
from siamesenorm.topologies import build_topology  # noqa: E402
from siamesenorm.training.config import Execution, RunConfig  # noqa: E402
from siamesenorm.training.loop import train  # noqa: E402
from siamesenorm.training.presets import PRESETS  # noqa: E402
from siamesenorm.world import World  # noqa: E402
from training_runs import assert_resumes, losses, records, with_model, with_task  # noqa: E402

EXECUTION = Execution(threads=1, checkpoint_every=4, compile="off", keep_states=True)
CPU = torch.device("cpu")
# DPM-Solver of diffusers 0.42 with numpy 2.4.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def digits(**changes: Any) -> RunConfig:
    """Return a tiny run on the digits; `model` and `task` are dicts of further changes."""
    model, task = changes.pop("model", {}), changes.pop("task", {})
    preset = PRESETS["digits-dit"].build("")
    optimizer = dataclasses.replace(preset.optimizer, warmup_steps=2, learning_rate=1e-2)
    config = dataclasses.replace(preset, optimizer=optimizer, execution=EXECUTION, batch=8, **changes)
    sizes = {"depth": 2, "dim": 16, "heads": 2, "hidden": 24, "patch_size": 4}
    return with_task(with_model(config, **{**sizes, **model}), **{"validation_images": 16, **task}).resolved()


def build(config: RunConfig, seed: int = 0) -> DiffusionTask:
    task = config.task.build(seed)
    assert isinstance(task, DiffusionTask)
    return task


class Constant(torch.nn.Module):
    """A model that predicts the same for every input, and keeps what it was given."""

    def __init__(self, noise: float = 0.0, variance: float | None = None) -> None:
        super().__init__()
        self.parameter = torch.nn.Parameter(torch.zeros(()))
        self.noise, self.variance = noise, variance
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def forward(self, x: Tensor, timesteps: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        self.seen.append((x, timesteps, labels))
        variance = None if self.variance is None else torch.full_like(x, self.variance)
        return torch.full_like(x, self.noise) + self.parameter, variance, {}


def evaluate(task: DiffusionTask, model: torch.nn.Module, count: int = 8) -> dict[str, float]:
    with World.joined(CPU) as world, torch.no_grad():
        return task.evaluate(model, count, world)


# --- the process


@pytest.mark.parametrize("schedule", ["linear", "scaled_linear", "squaredcos_cap_v2"])
def test_noise_is_that_of_diffusers(schedule: Any) -> None:
    process = DiffusionProcess(1000, schedule)
    scheduler = diffusers.DDPMScheduler(num_train_timesteps=1000, beta_schedule=schedule)
    images, noise, timesteps = torch.randn(4, 1, 3, 3), torch.randn(4, 1, 3, 3), torch.tensor([0, 1, 500, 999])
    expected = scheduler.add_noise(images, noise, timesteps)
    torch.testing.assert_close(process.noisy(images, noise, timesteps), expected, rtol=1e-4, atol=1e-4)


def test_the_bound_is_the_divergence_of_the_steps_of_diffusers() -> None:
    """Mean and log variance of p are read off a step of DDPMScheduler, those of q from x_0 itself."""
    process = DiffusionProcess(50, "linear")
    scheduler = process.build_sampler("ddpm", 50, clip=False, learned_sigma=True)
    generator = torch.Generator().manual_seed(0)
    images, noise, found = (torch.randn(1, 1, 2, 2, generator=generator) for _ in range(3))
    variance = torch.rand(1, 1, 2, 2, generator=generator) * 2 - 1
    for timestep in (1, 20, 49):
        timesteps = torch.tensor([timestep])
        noisy = process.noisy(images, noise, timesteps)
        log_variance = scheduler._get_variance(timestep, predicted_variance=variance)
        least = scheduler._get_variance(timestep, predicted_variance=-torch.ones(1, 1, 2, 2))
        mean, true_mean = (
            scheduler.step(torch.cat((each, least), 1), timestep, noisy, generator=Silent()).prev_sample
            for each in (found, (noisy - process.kept[timestep].sqrt() * images) / (1 - process.kept[timestep]).sqrt())
        )
        p = torch.distributions.Normal(mean.double(), (log_variance / 2).exp().double())
        q = torch.distributions.Normal(true_mean.double(), (least / 2).exp().double())
        expected = torch.distributions.kl_divergence(q, p).mean() / math.log(2)
        bound = process.bound(images, noisy, timesteps, found, variance)
        assert bound.shape == (1,)
        assert float(bound) == pytest.approx(float(expected), rel=1e-3)


class Silent:
    """A generator whose draws are 0, by diffusers' randn_tensor."""

    device = CPU


@pytest.fixture(autouse=True)
def silent_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    module = diffusers.schedulers.scheduling_ddpm
    drawn = module.randn_tensor
    monkeypatch.setattr(
        module,
        "randn_tensor",
        lambda shape, generator=None, **options: (
            torch.zeros(shape) if isinstance(generator, Silent) else drawn(shape, generator=generator, **options)
        ),
    )


def test_levels_have_all_the_probability() -> None:
    levels = torch.linspace(-1, 1, 256, dtype=torch.float64)
    for mean, std in ((0.3, 0.1), (-1.4, 0.5), (0.0, 4.0)):
        logs = level_log_likelihood(levels, torch.tensor(mean).double(), torch.tensor(math.log(std)).double())
        assert float(logs.exp().sum()) == pytest.approx(1, abs=1e-6)


def test_the_bound_of_the_first_timestep_is_a_likelihood_and_trains_the_variance_alone() -> None:
    process = DiffusionProcess(1000, "linear")
    images = torch.tensor([-1.0, 0.0, 1.0, 37 / 127.5 - 1]).view(1, 1, 2, 2)
    noise, variance = (torch.zeros(1, 1, 2, 2, requires_grad=True) for _ in range(2))
    first = torch.tensor([0])
    bound = process.bound(images, process.noisy(images, noise.detach(), first), first, noise, variance)
    assert 0 < bound.item() < 8, "less than the 8 bits of a uniform guess"
    bound.sum().backward()
    assert noise.grad is None and variance.grad is not None and variance.grad.abs().min() > 0


# --- loss and draws


def test_predicting_nothing_has_the_floor_as_its_loss() -> None:
    task = build(digits(task={"validation_images": 300}))
    assert task.floor == 1.0
    assert evaluate(task, Constant(), 100)["loss"] == pytest.approx(1, abs=0.03)
    assert task.loss(Constant(0.5), 0, 512).mean.item() == pytest.approx(1.25, abs=0.05)


def test_the_loss_is_the_squared_error_of_the_noise() -> None:
    task = build(digits())
    model = Constant()
    found = task.loss(model, 3, 4)
    (noisy, timesteps, labels), indices = model.seen[0], task.order.indices(3, 4)
    kept = task.process.kept[timesteps].float().view(-1, 1, 1, 1)
    images = torch.stack([scaled_pixels(task.train._images.image(int(i)), 8, 16) for i in indices])
    noise = (noisy - kept.sqrt() * images) / (1 - kept).sqrt()
    assert found.mean.item() == pytest.approx(noise.square().mean().item(), rel=1e-3)
    assert images.min() == -1 and images.max() == 1
    true = task.train.labels[torch.from_numpy(indices)]
    assert all(int(label) in (int(expected), 10) for label, expected in zip(labels, true, strict=True))


def test_draws_follow_from_seed_and_position() -> None:
    """However a batch is cut, and whatever was drawn before."""
    task = build(digits())
    whole, parts, other = Constant(), Constant(), Constant()
    task.loss(whole, 10, 6)
    torch.manual_seed(99)
    task.loss(parts, 10, 2)
    task.loss(parts, 12, 4)
    for index, expected in enumerate(whole.seen[0]):
        assert torch.equal(torch.cat([seen[index] for seen in parts.seen]), expected)
    build(digits(), seed=1).loss(other, 10, 6)
    assert not torch.equal(other.seen[0][1], whole.seen[0][1])


def test_a_tenth_of_the_labels_is_dropped_and_none_in_evaluation() -> None:
    task, model = build(digits()), Constant()
    task.loss(model, 0, 1000)
    assert int((model.seen[0][2] == 10).sum()) == pytest.approx(100, abs=30)
    timesteps = model.seen[0][1]
    assert timesteps.min() >= 0 and timesteps.max() <= 999 and timesteps.float().mean() == pytest.approx(500, abs=40)
    evaluated = Constant()
    evaluate(task, evaluated)
    assert torch.cat([seen[2] for seen in evaluated.seen]).max() < 10


def test_an_evaluation_is_the_same_for_every_seed_and_batch() -> None:
    first, second = Constant(0.1), Constant(0.1)
    results = [evaluate(build(digits(), seed), model, count) for seed, model, count in ((0, first, 8), (5, second, 16))]
    assert results[0]["loss"] == pytest.approx(results[1]["loss"], rel=1e-6) and results[0]["items"] == 16
    assert torch.equal(torch.cat([seen[0] for seen in first.seen]), second.seen[0][0])


def test_a_learned_variance_has_the_bound_as_its_loss() -> None:
    task = build(digits(model={"learned_sigma": True}))
    found = task.loss(Constant(variance=0.3), 0, 4)
    value, weight = found.auxiliary["variational_bound"]
    assert weight == 1 and found.objective.item() == pytest.approx((found.mean + value).item())


# --- runs


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "digits"
    config = dataclasses.replace(digits(steps=60, validation_every=30, ema=0.9), batch=16)
    assert train(config, run).label == "stable"
    return run


def test_it_learns(learned: Path) -> None:
    curve = losses(learned)
    assert curve[0] == pytest.approx(1, abs=0.1) and sum(curve[-10:]) / 10 < 0.8
    last = records(learned, "validation")[-1]
    assert last["loss"] < 0.8 and last["ema_loss"] < 1 and last["items"] == 16
    (model,) = records(learned, "model")
    assert model["floor"] == 1 and model["train_items"] == 1437 and model["unit"] == "squared error of the noise"


def test_interrupted_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    config = digits(steps=10, validation_every=5, ema=0.5, model={"dropout": 0.1, "learned_sigma": True})
    assert_resumes(config, tmp_path, after=7)


@pytest.mark.parametrize("method", ["post", "siamese", "dhc-2 + seednorm"])
def test_methods_train(method: str, tmp_path: Path) -> None:
    config = dataclasses.replace(digits(steps=3), optimizer=digits().optimizer).with_method(method).resolved()
    train(config, tmp_path / "run")
    assert all(map(math.isfinite, losses(tmp_path / "run")))


def test_its_configuration_survives_json_and_is_identified_by_its_images() -> None:
    config = digits()
    assert config.task.tag in available_tasks()
    assert RunConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    assert task_from_json(config.task.to_json()) == config.task
    other = with_task(config, digest="0" * 64)
    assert other.identity != config.identity
    with pytest.raises(UserError):
        other.task.build(0)
    assert config.task.of_size("dit-s-2").model.classes == 10


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"channels": 3}},
        {"model": {"classes": 9}},
        {"model": {"image_size": 16}},
        {"task": {"timesteps": 1}},
        {"task": {"label_dropout": 1.0}},
        {"task": {"flip": 1.5}},
        {"task": {"beta_schedule": "steep"}},
        {"task": {"validation_images": -1}},
        {"model": {"topology": build_topology("pre"), "patch_size": 3}},
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError) as refusal:
        build(digits(**changes))
    assert "\n" not in str(refusal.value)


# --- samples


def test_samples_are_the_same_in_any_batch() -> None:
    task = build(digits())
    model = task.build_model(CPU)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    for sampler in ("ddpm", "ddim", "dpm-solver"):
        options: dict[str, Any] = {"steps": 4, "sampler": sampler}
        together = task.sample(model, [3, 1, 7], 2.0, 5, **options)
        assert together.shape == (3, 1, 8, 8) and together.dtype == torch.uint8
        assert torch.equal(task.sample(model, [3, 1, 7], 2.0, 5, **options), together)
        alone = task.sample(model, [7], 2.0, 5, first=2, **options)[0]
        assert (alone.int() - together[2].int()).abs().max() <= 1
        assert not torch.equal(task.sample(model, [3, 1, 7], 2.0, 6, **options), together)
        assert not torch.equal(task.sample(model, [3, 1, 7], 1.0, 5, **options), together)


def test_guidance_moves_away_from_no_class() -> None:
    class ByClass(Constant):
        def forward(self, x: Tensor, timesteps: Tensor, labels: Tensor) -> Any:
            super().forward(x, timesteps, labels)
            return labels.float().view(-1, 1, 1, 1).expand_as(x), labels.float().view(-1, 1, 1, 1).expand_as(x), {}

    x, labels = torch.zeros(2, 1, 2, 2), torch.tensor([3, 5])
    noise, variance = guided(ByClass(), x, 7, labels, 10, 1.5)
    assert noise[:, 0, 0, 0].tolist() == [10 + 1.5 * (3 - 10), 10 + 1.5 * (5 - 10)]
    assert variance is not None and variance[:, 0, 0, 0].tolist() == [3, 5]
    model = ByClass()
    guided(model, x, 7, labels, 10, 1.0)
    assert len(model.seen) == 1 and len(model.seen[0][0]) == 2, "without guidance, half of the work"


def test_a_perfect_model_of_one_image_draws_it() -> None:
    """The best prediction where all images are one is known: each sampler then ends at that image."""
    task = build(digits())
    image = scaled_pixels(task.train._images.image(0), 8, 16)

    class Perfect(Constant):
        def forward(self, x: Tensor, timesteps: Tensor, labels: Tensor) -> Any:
            kept = task.process.kept[timesteps].float().view(-1, 1, 1, 1)
            return (x - kept.sqrt() * image) / (1 - kept).sqrt(), None, {}

    expected = ((image + 1) * 127.5).round()
    for sampler in ("ddpm", "ddim", "dpm-solver"):
        drawn = task.sample(Perfect(), [0, 1], 1.0, 0, steps=20, sampler=sampler)
        assert (drawn - expected).abs().max() <= 2, sampler


@pytest.mark.parametrize(
    ("classes", "options"),
    [([10], {}), ([-1], {}), ([0], {"steps": 0}), ([0], {"steps": 1001}), ([0], {"sampler": "euler"})],
)
def test_samples_that_do_not_exist_are_refused(classes: list[int], options: dict[str, Any]) -> None:
    task = build(digits())
    with pytest.raises(UserError):
        task.sample(Constant(), classes, 1.0, 0, **options)
    with pytest.raises(UserError):
        task.sample(Constant(), [0], math.nan, 0)


def test_training_images_are_mirrored_by_chance() -> None:
    plain, mirrored = (build(digits(task={"flip": flip})) for flip in (0.0, 0.5))
    image = plain.train.draw(3, torch.Generator())
    drawn = [mirrored.train.draw(3, torch.Generator().manual_seed(seed)) for seed in range(200)]
    count = sum(torch.equal(each, image.flip(-1)) for each in drawn)
    assert sum(torch.equal(each, image) for each in drawn) == 200 - count and 70 < count < 130
    assert torch.equal(mirrored.held_out.draw(3, torch.Generator()), plain.held_out.draw(3, torch.Generator()))


# --- latents


@pytest.fixture(scope="module")
def vae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write an AutoencoderKL of random weights: images of 3 channels to 2 x 4 x 4."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("models") / "vae"
    model = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(4, 4),
        norm_num_groups=2,
        latent_channels=2,
        scaling_factor=0.5,
    )
    model.save_pretrained(path)
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache of latents, for a few of the digits."""
    few = open_images("digits")
    few = dataclasses.replace(few, train=few.train.part(range(24)), held_out=few.held_out.part(range(16)))
    monkeypatch.setattr(diffusion, "open_images", lambda _: few)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "siamesenorm" / "latents"


def latent_digits(vae: Path, **changes: Any) -> RunConfig:
    sizes = {"channels": 2, "image_size": 4, "patch_size": 2}
    task = {"vae": str(vae), **changes.pop("task", {})}
    return digits(model={**sizes, **changes.pop("model", {})}, task=task, **changes)


def test_latents_are_encoded_once(vae: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = latent_digits(vae)
    assert config.task.digest != digits().task.digest
    task = build(config)
    (stored,) = cache.glob("[!.]*")
    assert sorted(each.name for each in stored.iterdir()) == ["held_out.npy", "train.npy"]
    monkeypatch.setattr(Autoencoder, "encode", lambda *_: pytest.fail("encoded twice"))
    again = build(config)
    drawn = [each.train.draw(5, torch.Generator().manual_seed(1)) for each in (task, again)]
    assert torch.equal(*drawn) and drawn[0].shape == (2, 4, 4)

    reference = diffusers.AutoencoderKL.from_pretrained(vae).eval()
    image = scaled_pixels(open_images("digits").train.image(5), 8, 16).expand(1, 3, 8, 8)
    with torch.no_grad():
        found = reference.encode(image).latent_dist
    e = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(drawn[0], ((found.mean + found.std * e) * 0.5)[0], rtol=1e-3, atol=1e-4)


def test_mirrored_images_have_latents_of_their_own(vae: Path, cache: Path) -> None:
    plain, mirrored = build(latent_digits(vae)), build(latent_digits(vae, task={"flip": 1.0}))
    assert len(list(cache.glob("[!.]*"))) == 2, "those of the images are used again"
    image = scaled_pixels(open_images("digits").train.image(5), 8, 16)
    moments = Autoencoder(vae).encode(image.flip(-1)[None])[0].chunk(2)
    generator, reference = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    drawn = mirrored.train.draw(5, generator)
    torch.rand((), generator=reference)  # whether to mirror
    expected = (moments[0] + moments[1] * torch.randn(2, 4, 4, generator=reference)) * 0.5
    torch.testing.assert_close(drawn, expected, rtol=1e-3, atol=1e-4)
    held_out = [each.held_out.draw(3, torch.Generator().manual_seed(1)) for each in (plain, mirrored)]
    assert torch.equal(*held_out)


def test_an_interrupted_encoding_leaves_nothing_that_is_read(vae: Path, cache: Path) -> None:
    encode, calls = Autoencoder.encode, []

    def broken(self: Autoencoder, images: Tensor) -> Tensor:
        calls.append(len(images))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return encode(self, images)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Autoencoder, "encode", broken)
        with pytest.raises(KeyboardInterrupt):
            build(latent_digits(vae))
    assert not list(cache.glob("[!.]*"))
    assert len(build(latent_digits(vae)).train) == 24
    assert [each.name for each in cache.iterdir() if each.name.endswith(".tmp")] == []


def test_a_run_on_latents_trains_and_samples(vae: Path, cache: Path, tmp_path: Path) -> None:
    config = latent_digits(vae, steps=3, model={"learned_sigma": True})
    train(config, tmp_path / "run")
    assert losses(tmp_path / "run")[0] == pytest.approx(1, abs=0.3)
    task = build(config)
    drawn = task.sample(task.build_model(CPU), [1, 2], 1.5, 0, steps=2)
    assert drawn.shape == (2, 3, 8, 8), "decoded"


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("channels", [1, 4])
def test_latents_of_another_width_are_refused(vae: Path, channels: int) -> None:
    with pytest.raises(UserError) as refusal:
        latent_digits(vae, model={"channels": channels})
    assert "2 channels" in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.usefixtures("cache")
def test_what_is_no_autoencoder_is_refused(vae: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        latent_digits(tmp_path / "nothing")
    copy = tmp_path / "vae"
    copy.mkdir()
    for name in (latents_module.CONFIG_FILE, latents_module.WEIGHTS_FILE):
        (copy / name).write_bytes((vae / name).read_bytes())
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "_class_name": "UNet2DModel"}))
    with pytest.raises(UserError):
        Autoencoder(copy)
    (copy / "config.json").write_text("{")
    with pytest.raises(UserError):
        Autoencoder(copy)
    (copy / "config.json").write_text(json.dumps({**config, "in_channels": 2}))
    with pytest.raises(UserError):
        build(latent_digits(copy))
    (copy / "config.json").write_text(json.dumps(config))
    (copy / latents_module.WEIGHTS_FILE).write_bytes(b"damaged")
    with pytest.raises(UserError) as refusal:
        _ = Autoencoder(copy).model
    assert "\n" not in str(refusal.value)


# --- pixels


def test_larger_images_are_reduced_and_cropped_and_smaller_ones_refused() -> None:
    wide = torch.zeros(3, 8, 16, dtype=torch.uint8)
    wide[:, :, 4:12] = 255
    found = scaled_pixels(wide, 4, 255)
    assert found.shape == (3, 4, 4) and found.min() > 0.8 and found.max() <= 1
    same = torch.arange(64, dtype=torch.uint8).view(1, 8, 8)
    torch.testing.assert_close(scaled_pixels(same, 8, 63), same.float() / 31.5 - 1)
    with pytest.raises(UserError):
        scaled_pixels(wide, 9, 255)


def test_the_official_form_is_the_default() -> None:
    assert DiffusionTaskConfig().model.topology == build_topology(OFFICIAL)
