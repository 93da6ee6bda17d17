"""Accuracy of classifiers under attack, beside the constants.

Pixels through adversarial-robustness-toolbox, token vectors through our own steps.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lipbound.analysis.network import NetworkJacobian, batches, chain, network_inputs
from lipbound.devices import in_own_modes
from lipbound.errors import LipboundError

ATTACKS = ("clean", "fgsm-2", "fgsm-4", "pgd-2", "pgd-4", "autoattack-2")
"""The columns of Tables 1-4 of Yudin et al. 2025: attack, and L-infinity budget in 1/255."""
PGD_STEPS, AUTO_STEPS = 4, 10
SOLVERS = ("fgsm", "pgd", "autoattack")


class _Pixels(nn.Module):
    """A classifier as a function of pixels in [0, 1], its normalisation inside."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: PreTrainedModel, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.model = model
        for name, values in (("mean", mean), ("std", std)):  # buffers move with the model
            self.register_buffer(name, torch.tensor(values).view(1, -1, 1, 1))
        self.to(next(model.parameters()).device)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(pixel_values=(x - self.mean) / self.std).logits
        return logits


@in_own_modes
def robust_accuracy(
    model: PreTrainedModel,
    images: Tensor,
    labels: Tensor,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    attacks: Sequence[str] = ATTACKS,
    norm: str = "linf",
    batch: int = 128,
    seed: int = 0,
) -> dict[str, float]:
    """Accuracy of an image classifier under attacks in pixel space, in percent.

    Attacks are those of adversarial-robustness-toolbox (extra ``robustness``).

    Args:
        model: an image classifier of transformers, in float32.
        images: (n, channels, height, width), pixels in [0, 1], before normalisation. labels: (n,).
        mean, std: of the checkpoint's image processor, per channel.
        attacks: "clean", or "fgsm-B", "pgd-B" (4 steps, step B/2, random start), "autoattack-B"
            (APGD on cross entropy, and from three classes on also on the ratio of differences of
            logits, 10 steps each, as that toolbox implements them). B is the budget: in 1/255 for
            the norm "linf", in units of pixel values, all of the image together, for "l2".
        norm: "linf" or "l2".
        batch: images at a time. seed: of random starts.

    Returns:
        The accuracy for every attack. An attacked accuracy is an upper bound on what stronger
        attacks leave, not a certificate.

    Raises:
        LipboundError: unknown attack or norm, pixels outside [0, 1], adversarial-robustness-toolbox
            not installed.
    """
    if norm not in ("linf", "l2"):
        raise LipboundError(f"norm is {norm!r}; give 'linf' or 'l2'")
    parsed = {name: _parse(name) for name in attacks}
    if float(images.min()) < 0 or float(images.max()) > 1:
        raise LipboundError(
            f"pixels lie between {float(images.min()):.3g} and {float(images.max()):.3g}; give "
            "them in [0, 1], before normalisation"
        )
    try:
        from art.estimators.classification import PyTorchClassifier
    except ImportError as error:
        raise LipboundError(
            "attacks in pixel space need adversarial-robustness-toolbox; pip install "
            "'lipbound[robustness]'"
        ) from error
    device, training = next(model.parameters()).device, model.training
    state = np.random.get_state()  # noqa: NPY002  (what the toolbox draws from)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        np.random.seed(seed)  # noqa: NPY002
        torch.manual_seed(seed)
        try:
            classifier = PyTorchClassifier(
                _Pixels(model.eval(), mean, std),
                loss=nn.CrossEntropyLoss(),
                input_shape=tuple(images.shape[1:]),
                nb_classes=model.config.num_labels,
                clip_values=(0.0, 1.0),
                device_type="cpu" if device.type == "cpu" else "gpu",
            )
            pixels, targets = images.float().cpu().numpy(), labels.cpu().numpy()
            results = {}
            for name, (solver, budget) in parsed.items():
                found = pixels
                if solver is not None:
                    size = budget / 255 if norm == "linf" else budget
                    attack = _attack(classifier, solver, size, norm, batch)
                    classes = np.eye(classifier.nb_classes, dtype=np.float32)
                    found = attack.generate(x=pixels, y=classes[targets])
                guesses = classifier.predict(found, batch_size=batch).argmax(-1)
                results[name] = 100 * float((guesses == targets).mean())
        finally:
            np.random.set_state(state)  # noqa: NPY002
            model.to(device).train(training)  # the toolbox takes it to the first GPU
    return results


def _parse(name: str) -> tuple[str | None, float]:
    if name == "clean":
        return None, 0.0
    match = re.fullmatch(rf"({'|'.join(SOLVERS)})-([0-9.]+)", name)
    if not match:
        raise LipboundError(
            f"unknown attack {name!r}; give 'clean' or one of {', '.join(SOLVERS)} with its "
            "budget, such as 'pgd-2'"
        )
    return match[1], float(match[2])


def _attack(classifier: Any, solver: str, size: float, norm: str, batch: int) -> Any:
    from art.attacks import evasion

    ball: dict[str, Any] = {"norm": np.inf if norm == "linf" else 2, "eps": size}
    ball["batch_size"] = batch
    if solver == "fgsm":
        return evasion.FastGradientMethod(classifier, **ball)
    step = ball | {"eps_step": size / 2}
    if solver == "pgd":
        return evasion.ProjectedGradientDescentPyTorch(
            classifier, max_iter=PGD_STEPS, num_random_init=1, verbose=False, **step
        )
    losses = ["cross_entropy", "difference_logits_ratio"]
    parts = [
        evasion.AutoProjectedGradientDescent(
            classifier, max_iter=AUTO_STEPS, nb_random_init=1, loss_type=loss, verbose=False, **step
        )
        for loss in losses[: min(2, classifier.nb_classes - 1)]  # the latter needs three logits
    ]
    return evasion.AutoAttack(classifier, attacks=parts, **step)


@in_own_modes
def embedding_accuracy(
    model: PreTrainedModel,
    inputs: Mapping[str, Tensor],
    labels: Tensor,
    radius: float,
    *,
    steps: int = 10,
    batch: int = 32,
    seed: int = 0,
) -> dict[str, float]:
    r"""Accuracy of a classifier under attacks on token vectors, in percent.

    For text or images; the vectors of a sample may move by ``radius`` in all (Frobenius norm).

    Args:
        model, inputs: as for `lipbound.network_norm`; the model has logits of a few classes,
            (samples, classes).
        labels: (samples,).
        radius: in the units of the token vectors after the embeddings.
        steps: of projected gradient ascent on the cross entropy, each of radius/4, from a random
            start.

    Returns:
        "clean"; "singular": along the top right singular vector of the network's Jacobian, the
        worse of both directions; "gradient": one step along the gradient; "pgd". "first_order":
        share of samples whose margin over every other class exceeds ``radius`` times the length of
        its gradient. That is what the network's linearisation promises: neither a bound nor an
        attack.

    Raises:
        LipboundError: a radius that is not positive, or logits that are not (samples, classes).
    """
    if not radius > 0:
        raise LipboundError(f"radius is {radius}; it must be positive")
    generator = torch.Generator().manual_seed(seed)
    right: Counter[str] = Counter()
    model, inputs, count = network_inputs(model, inputs)
    for piece, samples in batches(inputs, count, batch):
        with chain(model, piece, "embeddings", "logits") as (f, x, real):
            targets = labels[samples].to(x.device).clone()
            for name, good in _attacked(f, x, real, targets, radius, steps, generator).items():
                right[name] += int(good.sum())
    return {name: 100 * found / count for name, found in right.items()}


def _attacked(
    f: Callable[[Tensor], Tensor],
    x: Tensor,
    real: Tensor | None,
    labels: Tensor,
    radius: float,
    steps: int,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Which samples are classified rightly, for every attack, (samples,) bool."""
    with torch.no_grad():
        logits = f(x)
    if logits.ndim != 2:
        raise LipboundError(
            f"the logits have shape {tuple(logits.shape)}; attacks need one row of classes for "
            "each sample"
        )

    def good(move: Tensor) -> Tensor:
        with torch.no_grad():
            return f(x + move).argmax(-1) == labels

    def unit(move: Tensor) -> Tensor:
        move = move if real is None else move * real
        return move / torch.linalg.vector_norm(move.flatten(1), dim=1).clamp_min(1e-30).view(
            -1, 1, 1
        )

    def gradient(move: Tensor) -> Tensor:
        with torch.enable_grad():
            at = (x + move).requires_grad_()
            loss = nn.functional.cross_entropy(f(at), labels, reduction="sum")
            return torch.autograd.grad(loss, at)[0]

    rows = NetworkJacobian(f, x, real).dense()  # (samples, classes, N D)
    top = torch.linalg.svd(rows.double(), full_matrices=False).Vh[:, 0].to(x.dtype).view(x.shape)
    results = {
        "clean": logits.argmax(-1) == labels,
        "singular": good(radius * top) & good(-radius * top),
        "gradient": good(radius * unit(gradient(torch.zeros_like(x)))),
    }
    move = radius * unit(torch.randn(x.shape, generator=generator).to(x))
    for _ in range(steps):
        move = move + radius / 4 * unit(gradient(move))
        length = torch.linalg.vector_norm(move.flatten(1), dim=1).view(-1, 1, 1)
        move = move * (radius / length.clamp_min(1e-30)).clamp(max=1.0)
    results["pgd"] = good(move)
    own = rows.gather(1, labels[:, None, None].expand(-1, 1, rows.shape[2]))
    slope = torch.linalg.vector_norm(own - rows, dim=-1)
    margin = logits.gather(1, labels[:, None]) - logits
    results["first_order"] = (margin > radius * slope).scatter(1, labels[:, None], True).all(-1)
    return results
