"""Modules as researchers write them, each about a trick that some strategy could get wrong.

Each takes 8 numbers a row. Its output is a prediction, ``(rows, 1)``, or the loss of each row,
``(rows,)``. They are not typed, as such code is not.
"""

# mypy: ignore-errors

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from distcore import Phase, Simple

X = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))
WORDS = 16
"""Tokens that ``words`` makes of numbers."""


def words(x: Tensor) -> Tensor:
    """Return tokens, int64 ``(rows, 8)``."""
    return (x * 4).floor().long().add(WORDS // 2).clamp(0, WORDS - 1)


def lengths(x: Tensor) -> Tensor:
    """Return a length of each row, 1 to 8."""
    return words(x)[:, 0] % 8 + 1


class Own(Simple):
    """A user's task around a net."""

    def __init__(self, net: Callable[[], nn.Module]) -> None:
        super().__init__()
        self._net = net

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        return TensorDataset(X), TensorDataset(X[:5])

    def model(self) -> nn.Module:
        return self._net()

    def row_loss(self, model: nn.Module, batch: Any) -> Any:
        out = model(batch[0])
        out = self._net.read(out) if hasattr(self._net, "read") else out
        return (
            out if out.dim() == 1 else (out - batch[0].sum(1, keepdim=True).tanh()).square()[:, 0]
        )


MODULES: dict[str, Callable[[], nn.Module]] = {}
"""Classes of modules, and functions that build one, by name."""


def listed(net: Any) -> Any:
    MODULES[net.__name__] = net
    return net


class Net(nn.Module):
    """A module of some layers; a subclass has what is special."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Any = nn.Linear(8, 12)
        self.last: Any = nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.first(x).tanh())


# Weights that are computed


@listed
class WeightNorm(Net):
    """The old weight norm, by a hook before forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.nn.utils.weight_norm(self.first)  # type: ignore[no-untyped-call]


@listed
class WeightNormParametrized(Net):
    """The new one, by a parametrization."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.first)


@listed
class Orthogonal(Net):
    """A weight that stays orthogonal."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.orthogonal(self.first)


@listed
class SpectralNorm(Net):
    """A weight over its largest singular value, which each pass estimates better."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.spectral_norm(self.first)


class Symmetric(nn.Module):
    """A parametrization: the upper triangle counts."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


@listed
class SymmetricWeight(Net):
    """A parametrization of one's own, used twice in a forward pass, and cached in it."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Linear(12, 12)
        parametrize.register_parametrization(self.square, "weight", Symmetric())

    def forward(self, x: Tensor) -> Any:
        with parametrize.cached():
            x = self.first(x).tanh()
            return self.last(self.square(self.square(x)).tanh())


@listed
class Pruned(Net):
    """A weight that is pruned by a mask."""

    def __init__(self) -> None:
        super().__init__()
        prune.l1_unstructured(self.first, "weight", amount=0.5)  # type: ignore[no-untyped-call]


@listed
class DropConnect(Net):
    """Weights that are dropped."""

    def forward(self, x: Tensor) -> Any:
        return self.last(
            F.linear(x, F.dropout(self.first.weight, 0.3, self.training), self.first.bias).tanh()
        )


@listed
class StandardizedWeight(nn.Module):
    """A convolution whose weight is standardized in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 6, 3, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Any:
        weight = self.conv.weight
        weight = (weight - weight.mean((1, 2), keepdim=True)) / (
            weight.std((1, 2), keepdim=True) + 1e-5
        )
        x = F.conv1d(x[:, None], weight, self.conv.bias, padding=1)
        return self.last(self.norm(x).relu().mean(2))


class StandardConv(nn.Conv1d):
    """The same as a layer of its own."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        weight = (weight - weight.mean((1, 2), keepdim=True)) / (
            weight.std((1, 2), keepdim=True) + 1e-5
        )
        return self._conv_forward(input, weight, self.bias)


@listed
class StandardizedLayers(nn.Sequential):
    """Layers that standardize their weights."""

    def __init__(self) -> None:
        layers = (
            nn.Unflatten(1, (1, 8)),
            StandardConv(1, 4, 3, padding=1),
            nn.ELU(),
            StandardConv(4, 4, 3),
        )
        super().__init__(*layers, nn.Flatten(), nn.Linear(24, 1))


@listed
class HyperNetwork(nn.Module):
    """A network writes the weights of another, a set for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.writer = nn.Linear(4, 4 * 3 + 3)
        self.last = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Any:
        weight, bias = self.writer(x[:, :4]).split([12, 3], 1)
        return self.last(
            (torch.einsum("ri,roi->ro", x[:, 4:], weight.view(-1, 3, 4)) + bias).tanh()
        )


@listed
class FunctionalCall(Net):
    """A layer is called with weights that are a function of its own."""

    def forward(self, x: Tensor) -> Any:
        weights = {name: 2 * value.tanh() for name, value in self.first.named_parameters()}
        return self.last(torch.func.functional_call(self.first, weights, (x,)).tanh())


# Tied weights


@listed
class TransposedTie(Net):
    """A decoder that is the encoder's transpose; each row's loss is its reconstruction."""

    def forward(self, x: Tensor) -> Any:
        code = self.first(x).tanh()
        return (F.linear(code, self.first.weight.t()) - x).square().mean(1) + self.last(code)[
            :, 0
        ].square()


@listed
class TiedEmbedding(nn.Module):
    """A language model's head that shares the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Any:
        tokens = words(x)
        logits = self.head(self.mix(self.embed(tokens[:, :-1])).tanh())
        return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)


@listed
class OneParameterTwice(Net):
    """The same parameter under names of three layers, one of them in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(12, 12) for name in "abc"})
        self.layers["b"].weight = self.layers["a"].weight
        self.layers["c"].weight = self.layers["a"].weight

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for layer in self.layers.values():
            x = layer(x).tanh()
        return self.last(x)


@listed
class SharedBlock(Net):
    """A block that is applied three times, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(12, 12), nn.LayerNorm(12))
        self.again = self.block

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for block in (self.block, self.again, self.block):
            x = x + block(x).tanh()
        return self.last(x)


# Sequences


@listed
class PackedGRU(nn.Module):
    """A GRU over packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 6)
        self.rnn = nn.GRU(6, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.last = nn.Linear(10, 1)

    def forward(self, x: Tensor) -> Any:
        packed = pack_padded_sequence(
            self.embed(words(x)), lengths(x).cpu(), batch_first=True, enforce_sorted=False
        )
        hidden, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.last(hidden.sum(1))


@listed
class LearnedState(nn.Module):
    """An LSTM whose first state is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(1, 5, batch_first=True, proj_size=3)
        self.hidden, self.cell = (
            nn.Parameter(torch.zeros(1, 1, 3)),
            nn.Parameter(torch.zeros(1, 1, 5)),
        )
        self.last = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Any:
        start = (
            self.hidden.expand(1, len(x), 3).contiguous(),
            self.cell.expand(1, len(x), 5).contiguous(),
        )
        return self.last(self.rnn(x[:, :, None], start)[0][:, -1])


@listed
class CellLoop(nn.Module):
    """A cell that is called once for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(1, 6)
        self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Any:
        hidden = x.new_zeros(len(x), 6)
        for position in range(8):
            hidden = self.cell(x[:, position, None], hidden)
        return self.last(hidden)


@listed
class CTC(nn.Module):
    """Connectionist temporal classification."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(1, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        frames = self.head(self.embed(x[:, :, None]).tanh()).log_softmax(2).transpose(0, 1)
        targets, all_frames = words(x)[:, :3] % 4 + 1, torch.full((len(x),), 8)
        return F.ctc_loss(
            frames,
            targets,
            all_frames,
            lengths(x).clamp(max=3),
            reduction="none",
            zero_infinity=True,
        )


@listed
class CRF(nn.Module):
    """A linear chain with transitions that are its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.emit = nn.Linear(1, 4)
        self.start = nn.Parameter(torch.randn(4) * 0.1)
        self.move = nn.Parameter(torch.randn(4, 4) * 0.1)

    def forward(self, x: Tensor) -> Any:
        scores, tags = self.emit(x[:, :, None]), words(x) % 4
        every = self.start + scores[:, 0]
        mine = self.start[tags[:, 0]] + scores[:, 0].gather(1, tags[:, :1])[:, 0]
        for position in range(1, 8):
            every = (every[:, :, None] + self.move).logsumexp(1) + scores[:, position]
            here = tags[:, position]
            mine = (
                mine
                + self.move[tags[:, position - 1], here]
                + scores[:, position].gather(1, here[:, None])[:, 0]
            )
        return every.logsumexp(1) - mine


@listed
class Pointer(nn.Module):
    """Additive attention that points to a position."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query = nn.Linear(1, 6), nn.Linear(8, 6)
        self.point = nn.Parameter(torch.randn(6) * 0.3)

    def forward(self, x: Tensor) -> Any:
        scores = (self.key(x[:, :, None]) + self.query(x)[:, None]).tanh() @ self.point
        return F.cross_entropy(scores, x.argmax(1), reduction="none")


@listed
class CachedMask(nn.Module):
    """Attention by einsum whose mask is made in the first pass and kept as a buffer."""

    mask: Any

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.last = nn.Linear(1, 12), nn.Linear(4, 1)
        self.register_buffer("mask", None, persistent=False)

    def forward(self, x: Tensor) -> Any:
        query, key, value = self.qkv(x[:, :, None]).chunk(3, 2)
        if self.mask is None:
            self.mask = torch.ones(8, 8, dtype=torch.bool).tril()
        scores = torch.einsum("rid,rjd->rij", query, key) / 2
        return self.last((scores.masked_fill(~self.mask, -math.inf).softmax(2) @ value).mean(1))


@listed
class Attention(Net):
    """torch's own attention, which reads the weights of its child."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True, add_bias_kv=True)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x[:, None].expand(-1, 4, -1) * torch.arange(1, 5)[:, None])
        return self.last(self.attention(x, x, x, need_weights=False)[0].mean(1))


@listed
class Encoder(nn.Module):
    """torch's own encoder, which has a faster way through an evaluation, and a class token."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.embed = nn.Embedding(WORDS, 8, padding_idx=0)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.body = nn.TransformerEncoder(layer, 2)
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Any:
        padded = torch.arange(9) > lengths(x)[:, None]
        embedded = torch.cat([self.token.expand(len(x), 1, 8), self.embed(words(x))], 1)
        return self.last(self.body(embedded, src_key_padding_mask=padded)[:, 0])


# Experts, routes, and parts that some rows use


@listed
class Experts(Net):
    """Each row goes to the best of four experts, others' rows and weights are not touched."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(12, 4)
        self.experts = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        x = self.first(x).tanh()
        weight, chosen = self.gate(x).softmax(1).max(1)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            mixed = mixed.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return self.last(mixed)


@listed
class SkippedExperts(Experts):
    """The same, but an expert without rows is not called: ranks call other layers."""

    def forward(self, x: Tensor) -> Any:
        x = self.first(x).tanh()
        weight, chosen = self.gate(x).softmax(1).max(1)
        mixed = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero()[:, 0]
            mixed = mixed.index_add(0, rows, self.experts[number](x[rows]) * weight[rows, None])
        return self.last(mixed)


@listed
class StackedExperts(Net):
    """The weights of all experts in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(12, 4)
        self.weights = nn.Parameter(torch.randn(4, 12, 12) * 0.3)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x).tanh()
        return self.last(torch.einsum("ri,eio,re->ro", x, self.weights, self.gate(x).softmax(1)))


@listed
class Unused(Net):
    """A layer that no row uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(12, 12)


@listed
class Graph(nn.Module):
    """Messages over the edges of a graph with eight nodes a row."""

    edges: Any

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update, self.last = nn.Linear(8, 6), nn.GRUCell(6, 4), nn.Linear(4, 1)
        self.lift = nn.Linear(1, 4)
        self.register_buffer(
            "edges", torch.randint(0, 8, (2, 14), generator=torch.Generator().manual_seed(1))
        )

    def forward(self, x: Tensor) -> Any:
        source, target = (self.edges[:, None] + 8 * torch.arange(len(x))[:, None]).flatten(1)
        nodes = self.lift(x.reshape(-1, 1))
        for _ in range(2):
            sent = self.message(torch.cat([nodes[source], nodes[target]], 1)).relu()
            heard = torch.zeros(len(nodes), 6).index_add_(0, target, sent)
            nodes = self.update(heard, nodes)
        return self.last(nodes.view(len(x), 8, 4).mean(1))


@listed
class FiLM(Net):
    """A condition scales and moves the features."""

    def __init__(self) -> None:
        super().__init__()
        self.condition = nn.Embedding(WORDS, 24)

    def forward(self, x: Tensor) -> Any:
        scale, shift = self.condition(words(x)[:, 0]).chunk(2, 1)
        return self.last((self.first(x) * (1 + scale) + shift).relu())


@listed
class Capsules(nn.Module):
    """Routing by agreement."""

    def __init__(self) -> None:
        super().__init__()
        self.votes = nn.Parameter(torch.randn(4, 3, 2, 4) * 0.4)

    def forward(self, x: Tensor) -> Any:
        votes = torch.einsum("rci,cpid->rcpd", x.view(-1, 4, 2), self.votes)
        routes = votes.new_zeros(votes.shape[:3])
        for _ in range(3):
            parents = (routes.softmax(2)[..., None] * votes).sum(1)
            square = parents.square().sum(2, keepdim=True)
            parents = parents * square / (1 + square) / (square + 1e-6).sqrt()
            routes = routes + (votes * parents[:, None]).sum(3)
        return parents.norm(dim=2)[:, :1]


# Densities


@listed
class Flow(nn.Module):
    """Couplings with permutations; the loss of a row is its negative log likelihood."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)
        )
        for number in range(3):
            self.register_buffer(f"order{number}", torch.randperm(8))
        self.scale = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Any:
        volume = self.scale.sum()
        x = x * self.scale.exp()
        for number, net in enumerate(self.nets):
            kept, moved = x[:, self.get_buffer(f"order{number}")].chunk(2, 1)
            scale, shift = net(kept).tanh().chunk(2, 1)
            x, volume = torch.cat([kept, moved * scale.exp() + shift], 1), volume + scale.sum(1)
        return 0.5 * x.square().sum(1) - volume


@listed
class ActNorm(Flow):
    """Its scale follows from the first rows that it sees."""

    started: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("started", torch.tensor(False))

    def forward(self, x: Tensor) -> Any:
        if self.training and not self.started:
            with torch.no_grad():
                self.scale.copy_(-x.std(0).log())
                self.started.fill_(True)
        return super().forward(x)


@listed
class VAE(nn.Module):
    """A latent variable is drawn in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 6), nn.Linear(3, 8)

    def forward(self, x: Tensor) -> Any:
        mean, log_variance = self.encode(x).chunk(2, 1)
        drawn = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
        apart = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
        return (self.decode(drawn) - x).square().sum(1) + apart


@listed
class MixtureDensity(Net):
    """A mixture of normal distributions from torch.distributions."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(12, 9)

    def forward(self, x: Tensor) -> Any:
        weights, means, scales = super().forward(x).chunk(3, 1)
        kinds, parts = (
            torch.distributions.Categorical(logits=weights),
            torch.distributions.Normal(means, scales.exp()),
        )
        return -torch.distributions.MixtureSameFamily(kinds, parts).log_prob(x.sum(1))


@listed
class Autoregressive(nn.Module):
    """A masked layer, whose mask is a buffer that no checkpoint has."""

    mask: Any

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Linear(8, 8)
        self.log_scale = nn.Parameter(torch.zeros(8))
        self.register_buffer("mask", torch.ones(8, 8).tril(-1), persistent=False)

    def forward(self, x: Tensor) -> Any:
        mean = F.linear(x, self.mean.weight * self.mask, self.mean.bias)
        return (0.5 * ((x - mean) * self.log_scale.exp()).square() - self.log_scale).sum(1)


# State that forward updates


@listed
class Codebook(Net):
    """Vector quantization whose codes move toward what they stand for."""

    codes: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "codes", torch.randn(4, 12, generator=torch.Generator().manual_seed(2))
        )

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        nearest = torch.cdist(x.detach(), self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                self.codes.index_add_(0, nearest, 0.1 * (x - self.codes[nearest]))
        return self.last(x + (self.codes[nearest] - x).detach())


@listed
class LearnedCodes(Net):
    """Vector quantization whose codes are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(4, 12)

    def forward(self, x: Tensor) -> Any:
        code = self.first(x)
        near = self.codes(torch.cdist(code, self.codes.weight).argmin(1))
        apart = (near - code.detach()).square().mean(1) + 0.25 * (
            code - near.detach()
        ).square().mean(1)
        return (self.last(code + (near - code).detach())[:, 0] - x.sum(1).tanh()).square() + apart


@listed
class Queue(Net):
    """Contrasts a row with rows of earlier batches."""

    queue: Any
    at: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "queue", F.normalize(torch.randn(16, 12, generator=torch.Generator().manual_seed(3)))
        )
        self.register_buffer("at", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Any:
        query, key = F.normalize(self.first(x)), F.normalize(self.first(x * 1.1).detach())
        logits = (
            torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.t().clone()], 1) / 0.2
        )
        if self.training:
            with torch.no_grad():
                places = (self.at + torch.arange(len(x))) % 16
                self.queue[places] = key
                self.at.add_(len(x)).remainder_(16)
        return F.cross_entropy(
            logits, logits.new_zeros(len(x), dtype=torch.int64), reduction="none"
        )


@listed
class Memory(Net):
    """A hidden state in an attribute goes on from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.state = torch.zeros(12)

    def forward(self, x: Tensor) -> Any:
        hidden = (self.first(x) + self.state).tanh()
        if self.training:
            self.state = hidden.detach().mean(0)
        return self.last(hidden)


@listed
class TargetNetwork(Net):
    """A slow copy of a layer follows it in each pass of training."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(8, 12).requires_grad_(False)
        self.slow.load_state_dict(self.first.state_dict())

    def forward(self, x: Tensor) -> Any:
        if self.training:
            with torch.no_grad():
                for slow, fast in zip(self.slow.parameters(), self.first.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
        return (self.first(x) - self.slow(x * 1.1)).square().mean(1) + super().forward(x)[
            :, 0
        ].square()


@listed
class FakeQuantized(Net):
    """Quantization is simulated; an observer follows the range of the features."""

    def __init__(self) -> None:
        super().__init__()
        self.quantize = torch.ao.quantization.FakeQuantize(
            observer=torch.ao.quantization.MovingAverageMinMaxObserver, quant_min=0, quant_max=255
        )

    def forward(self, x: Tensor) -> Any:
        return self.last(self.quantize(self.first(x)).tanh())


@listed
class WritesData(Net):
    """Forward writes a weight by ``data``, which no version counts."""

    def forward(self, x: Tensor) -> Any:
        self.first.weight.data.clamp_(-0.2, 0.2)
        return super().forward(x)


@listed
class BatchNorm(Net):
    """Batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12))


# Gradients of its own


class Clipped(torch.autograd.Function):
    """A rectifier that lets small gradients of negative inputs through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: Tensor) -> Any:
        ctx.save_for_backward(x, slope)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, slope = ctx.saved_tensors
        return grad * torch.where(x > 0, 1.0, slope), (grad * x * (x < 0)).sum()


@listed
class OwnFunction(Net):
    """A function with a backward pass of its own, and a parameter of no dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Any:
        return self.last(Clipped.apply(self.first(x), self.slope))  # type: ignore[no-untyped-call]


class Reverse(torch.autograd.Function):
    """The identity, with a reversed gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -grad


@listed
class ReversedGradient(Net):
    """A domain classifier behind a reversed gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.domain = nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Any:
        features = self.first(x).tanh()
        domain = self.domain(Reverse.apply(features))[:, 0]  # type: ignore[no-untyped-call]
        apart = F.binary_cross_entropy_with_logits(domain, (x[:, 0] > 0).float(), reduction="none")
        return (self.last(features)[:, 0] - x.sum(1).tanh()).square() + apart


class Adjoint(torch.autograd.Function):
    """Euler steps whose backward pass goes along the path again."""

    @staticmethod
    def forward(ctx: Any, field: Any, x: Tensor, *weights: Tensor) -> Any:
        ctx.field, path = field, [x]
        with torch.no_grad():
            for _ in range(4):
                path.append(path[-1] + 0.25 * field(path[-1]))
        ctx.save_for_backward(*path)
        return path[-1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        weights = list(ctx.field.parameters())
        totals = [torch.zeros_like(weight) for weight in weights]
        for point in reversed(ctx.saved_tensors[:-1]):
            with torch.enable_grad():
                here = point.detach().requires_grad_()
                slope = ctx.field(here)
            moved, *parts = torch.autograd.grad(slope, [here, *weights], grad)
            grad = grad + 0.25 * moved
            totals = [total + 0.25 * part for total, part in zip(totals, parts, strict=True)]
        return None, grad, *totals


@listed
class NeuralODE(Net):
    """A differential equation by the adjoint method, which calls the field in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(12, 12), nn.Tanh())

    def forward(self, x: Tensor) -> Any:
        ended = Adjoint.apply(self.field, self.first(x), *self.field.parameters())  # type: ignore[no-untyped-call]
        return self.last(ended)


@listed
class Forces(Net):
    """Forces are the slopes of an energy, in training and in evaluation."""

    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = super().forward(x)
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=self.training)
        return energy[:, 0].square() + (force - x).square().mean(1)


@listed
class PerRowJacobian(Net):
    """Slopes of each row by torch.func."""

    def forward(self, x: Tensor) -> Any:
        def energy(row: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return F.linear(row, weight, bias).tanh().sum()

        slopes = torch.func.vmap(torch.func.grad(energy), (0, None, None))(
            x, self.first.weight, self.first.bias
        )
        return (slopes - x).square().mean(1) + super().forward(x)[:, 0].square()


@listed
class Equilibrium(Net):
    """A fixed point; a hook on it solves for the gradient in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(12, 12)
        with torch.no_grad():
            self.body.weight.mul_(0.3)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        with torch.no_grad():
            point = x
            for _ in range(30):
                point = (self.body(point) + x).tanh()
        point = (self.body(point) + x).tanh()
        if point.requires_grad:
            start = point.detach().requires_grad_()
            with torch.enable_grad():
                again = (self.body(start) + x.detach()).tanh()

            def solve(grad: Tensor) -> Tensor:
                total = grad
                for _ in range(30):
                    total = torch.autograd.grad(again, start, total, retain_graph=True)[0] + grad
                return total

            point.register_hook(solve)
        return self.last(point)


@listed
class BackwardHook(Net):
    """A hook on a module scales the gradient that passes through it."""

    def __init__(self) -> None:
        super().__init__()
        self.first.register_full_backward_hook(lambda module, inputs, outputs: None)
        self.last.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 0.5,))
        self.first.register_forward_hook(lambda module, inputs, output: output * 2)


@listed
class Checkpointed(Net):
    """Blocks that are computed again in the backward pass, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 12), nn.GELU(), nn.Dropout(0.2)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = x + checkpoint(block, x, use_reentrant=number == 0)
        return self.last(x)


@listed
class StochasticDepth(Net):
    """Rows skip a layer by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        kept = (torch.rand(len(x), 1) < 0.8) / 0.8 if self.training else 1.0
        return self.last(x + kept * self.block(x).tanh())


@listed
class FrozenPart(Net):
    """A part without gradients, by no_grad in forward, and single frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8)
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            x = self.base(x)
        return super().forward(x)


@listed
class OwnLoRA(Net):
    """A frozen weight beside two small ones, one of which starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, 8) * 0.3)
        self.up = nn.Parameter(torch.zeros(12, 2))

    def forward(self, x: Tensor) -> Any:
        return self.last((self.first(x) + x @ self.down.t() @ self.up.t()).tanh())


# Kinds of numbers, shapes and names


@listed
class ComplexLinear(nn.Module):
    """A layer of complex numbers, as torch has it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6, dtype=torch.complex64)
        self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.first(torch.view_as_complex(x.view(-1, 4, 2))).abs())


@listed
class SpectralConvolution(nn.Module):
    """A filter over frequencies whose complex weights are pairs of real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, 2))
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Any:
        return self.last(
            torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.filter), n=8).tanh()
        )


@listed
class Double(Net):
    """A module in fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, x: Tensor) -> Any:
        return super().forward(x.double())


@listed
class MixedKinds(Net):
    """One layer in bf16, another in fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(12, 12, dtype=torch.float64)
        self.coarse = nn.Linear(12, 12, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Any:
        x = self.middle(self.first(x).double()).tanh()
        return self.last(self.coarse(x.bfloat16()).float())


@listed
class Strided(nn.Module):
    """Parameters that are not contiguous: transposed, channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(8, 12).t() * 0.3)
        self.conv = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.last = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.conv((x @ self.turned.t()).view(-1, 3, 2, 2)).tanh().flatten(1))


@listed
class Scalars(Net):
    """Parameters of no dimensions and of one number, and a temperature that is read as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * self.scale.exp().clamp(max=100) + self.shift


@listed
class ReadsANumber(Net):
    """A parameter is read as a number of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.5, 2.5]))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * self.scale.mean() + float(self.scale.max())


@listed
class Collections(nn.Module):
    """Parameters in lists and dictionaries, some of whose names are words of frameworks."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(8, 8) * 0.3 for _ in range(2)])
        self.biases = nn.ParameterDict({"a/b": torch.zeros(8), "lr": torch.zeros(8)})
        self.module = nn.ModuleDict({"module": nn.Linear(8, 8), "_orig_mod": nn.Linear(8, 8)})
        self.model = nn.Sequential(nn.Linear(8, 1))
        self.register_parameter("none", None)
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Any:
        for weight, bias in zip(self.weights, self.biases.values(), strict=True):
            x = (x @ weight + bias).tanh()
        for layer in self.module.values():
            x = layer(x).tanh()
        return self.model(x)


@listed
class GivesDict(Net):
    """A module that returns a dictionary."""

    def forward(self, x: Tensor) -> Any:
        return {"hidden": self.first(x), "out": super().forward(x), "name": "mine", "none": None}

    @staticmethod
    def read(out: Any) -> Tensor:
        return out["out"] + 0.1 * out["hidden"].mean(1, keepdim=True)


@dataclass
class Output:
    """What a module returns."""

    out: Tensor
    hidden: list[Tensor]


@listed
class GivesDataclass(Net):
    """A module that returns a dataclass with a list."""

    def forward(self, x: Tensor) -> Any:
        return Output(super().forward(x), [self.first(x)])

    @staticmethod
    def read(out: Any) -> Tensor:
        return out.out + 0.1 * out.hidden[0].mean(1, keepdim=True)


class Named(NamedTuple):
    """What a module returns."""

    out: Tensor
    hidden: Tensor | None


@listed
class GivesNamedTuple(Net):
    """A module that returns a named tuple."""

    def forward(self, x: Tensor) -> Any:
        return Named(super().forward(x), None)

    @staticmethod
    def read(out: Any) -> Tensor:
        return out.out


@listed
class PlainTensor(Net):
    """A constant in an attribute that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.basis = torch.randn(8, 8, generator=torch.Generator().manual_seed(5))

    def forward(self, x: Tensor) -> Any:
        return super().forward(torch.cos(x @ self.basis))


@listed
class FourierFeatures(Net):
    """Random features in a buffer, of another shape than the rows."""

    features: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("features", torch.randn(8, 6))
        self.last = nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Any:
        x = x @ self.features
        return self.last(torch.cat([x.sin(), x.cos()], 1))


@listed
class Siren(nn.Module):
    """Sines, with their own start and a second derivative in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 10), nn.Linear(10, 10), nn.Linear(10, 1)])
        for layer in self.layers:
            nn.init.uniform_(
                layer.weight,
                -math.sqrt(6 / layer.in_features) / 5,
                math.sqrt(6 / layer.in_features) / 5,
            )

    def forward(self, x: Tensor) -> Any:
        for layer in list(self.layers)[:-1]:
            x = torch.sin(5 * layer(x))
        return self.layers[-1](x)


@listed
class SparseBag(nn.Module):
    """An embedding bag with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.last = nn.EmbeddingBag(WORDS, 6, mode="sum", sparse=True), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.bag(words(x)))


@listed
class Bag(nn.Module):
    """An embedding bag over offsets, with a weight for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.last = (
            nn.EmbeddingBag(WORDS, 6, mode="sum", include_last_offset=True),
            nn.Linear(6, 1),
        )

    def forward(self, x: Tensor) -> Any:
        offsets = torch.arange(len(x) + 1) * 8
        return self.last(self.bag(words(x).flatten(), offsets, per_sample_weights=x.flatten()))


@listed
class GrowsLazily(Net):
    """A parameter that the first forward pass makes."""

    def forward(self, x: Tensor) -> Any:
        if not hasattr(self, "late"):
            self.late = nn.Parameter(torch.ones(12))
        return self.last(self.first(x).tanh() * self.late)


@listed
class GrowsBuffer(Net):
    """A buffer that the first forward pass makes."""

    def forward(self, x: Tensor) -> Any:
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.linspace(0, 1, 12))
        return self.last(self.first(x).tanh() * self.late)


@listed
def compiled() -> nn.Module:
    """A net with a part under torch.compile."""
    net = Net()
    net.first = torch.compile(net.first, backend="eager")
    return net


@listed
class CompiledForward(Net):
    """A net that compiles itself in place."""

    def __init__(self) -> None:
        super().__init__()
        self.compile(backend="eager")


@listed
class Delegates(nn.Module):
    """A wrapper that has the attributes of what it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.first(x).relu())


@listed
class CallsMethods(Net):
    """Forward goes by methods of parts, not by their forward."""

    class Part(nn.Module):
        """A part without a forward of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(12, 12) * 0.3)

        def apply_to(self, x: Tensor) -> Tensor:
            return (x @ self.weight).tanh()

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(CallsMethods.Part() for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for part in self.parts:
            x = part.apply_to(x)
        return self.last(x)


@listed
class OtherMode(Net):
    """A part stays in evaluation mode during training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Any:
        return self.last(self.norm(self.first(x)).tanh())


@listed
class Sums(nn.Module):
    """Rows of other sizes: a ragged sum by index, and a loss of a row from its own words only."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = (
            nn.Embedding(WORDS, 6, padding_idx=3, scale_grad_by_freq=False),
            nn.Linear(6, 1),
        )

    def forward(self, x: Tensor) -> Any:
        kept = torch.arange(8) < lengths(x)[:, None]
        row, place = kept.nonzero(as_tuple=True)
        summed = torch.zeros(len(x), 6).index_add(0, row, self.embed(words(x)[row, place]))
        return self.last(summed)


# Public reports about torch's wrappers


@listed
class CellBatchNorm(nn.Module):
    """Batch normalization inside of a recurrent loop: a buffer that each position updates."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.norm, self.last = nn.LSTMCell(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Any:
        state = (x.new_zeros(len(x), 4), x.new_zeros(len(x), 4))
        for position in range(4):
            hidden, cell = self.cell(x[:, position, None], state)
            state = (self.norm(hidden), cell)
        return self.last(state[0])


@listed
class CheckpointedBuffers(Net):
    """A recomputed block with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(12, 12), nn.LayerNorm(12), nn.GELU())
        self.register_buffer("scale", torch.full((12,), 0.5))

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(lambda x: self.block(x) * self.scale, x, use_reentrant=False)
        return self.last(x)


@listed
class CheckpointedSlope(Net):
    """A slope through a recomputed layer, inside of the loss."""

    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = self.last(checkpoint(self.first, x, use_reentrant=False).tanh())
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=self.training)
        return out[:, 0].square() + slope.square().mean(1)


@listed
class OddTie(TiedEmbedding):
    """A tied embedding whose rows no two ranks can divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS + 1, 8)
        self.head = nn.Linear(8, WORDS + 1, bias=False)
        self.head.weight = self.embed.weight


@listed
class IntegerParameter(Net):
    """A frozen parameter of bytes, as quantized layers have."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.Parameter(torch.arange(8, dtype=torch.uint8), requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x * self.levels)


@listed
class ReusedHead(Net):
    """A norm and a head that are used again later in the same pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body = nn.RMSNorm(12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Any:
        early = self.last(self.norm(self.first(x)))
        return early + self.last(self.norm(self.body(self.first(x)).tanh()))


@listed
class OneLayerTrains(Net):
    """One parameter of a model trains."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.last.bias.requires_grad_(True)


@listed
class TwinRecomputed(Net):
    """A body that two recomputations of one pass call, each with a backward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Any:
        one = checkpoint(self.body, self.first(x), use_reentrant=True)
        two = checkpoint(self.body, self.first(x.flip(1)), use_reentrant=True)
        return self.last((one - two).tanh())


@listed
class CalledAsOften(Net):
    """A head that is called as often as the rows of a batch say."""

    def forward(self, x: Tensor) -> Any:
        x = self.first(x).tanh()
        out = self.last(x)
        for _ in range(int((x[:, 0] > 0).sum())):
            out = out + 0.1 * self.last(x)
        return out


@listed
class FuncGrad(Net):
    """A layer inside of a function that torch.func differentiates."""

    def forward(self, x: Tensor) -> Any:
        def energy(hidden: Tensor) -> Tensor:
            return self.last(hidden).tanh().sum()

        slope, _ = torch.func.grad_and_value(energy)(self.first(x))
        return slope.square().mean(1) + self.last(self.first(x))[:, 0].square()


@listed
class FunctionalSlope(Net):
    """A slope by torch.autograd.functional, with a gradient of its own in training."""

    def forward(self, x: Tensor) -> Any:
        def energy(x: Tensor) -> Tensor:
            return self.last(self.first(x).tanh()).sum()

        with torch.enable_grad():
            _, slope = torch.autograd.functional.vjp(energy, x, create_graph=self.training)
        return super().forward(x)[:, 0].square() + slope.square().mean(1)


class Adversarial(Own):
    """Two phases: a discriminator, then a generator."""

    class Pair(nn.Module):
        """A generator and a discriminator in one module."""

        def __init__(self) -> None:
            super().__init__()
            self.generator = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 8))
            self.critic = nn.Sequential(nn.Linear(8, 10), nn.LeakyReLU(), nn.Linear(10, 1))

        def forward(self, x: Tensor) -> Any:
            made = self.generator(x[:, :4])
            return self.critic(made)[:, 0], self.critic(x)[:, 0], self.critic(made.detach())[:, 0]

    def phases(self) -> dict[str, Phase]:
        return {
            "critic": Phase("^critic", self._critic),
            "generator": Phase("^generator", self._generator),
        }

    def _critic(self, model: nn.Module, batch: Any) -> Any:
        _, real, made = model(batch[0])
        return (F.softplus(-real) + F.softplus(made)).sum()

    def _generator(self, model: nn.Module, batch: Any) -> Any:
        return F.softplus(-model(batch[0])[0]).sum()

    def row_loss(self, model: nn.Module, batch: Any) -> Any:
        return F.softplus(-model(batch[0])[0])


class Siamese(Own):
    """Calls its model twice in one loss."""

    margin: ClassVar = 0.5

    def row_loss(self, model: nn.Module, batch: Any) -> Any:
        one, other = model(batch[0]), model(batch[0].flip(1))
        return F.relu(self.margin + (one - other)[:, 0] * batch[0][:, 0].sign())


def task_of(name: str) -> Own:
    """Return the task around a module by its name."""
    own: dict[str, Callable[[], Own]] = {
        "Adversarial": lambda: Adversarial(Adversarial.Pair),
        "Siamese": lambda: Siamese(Net),
        "SiameseBatchNorm": lambda: Siamese(MODULES["BatchNorm"]),
    }
    return own[name]() if name in own else Own(MODULES[name])


NAMES = [*MODULES, "Adversarial", "Siamese", "SiameseBatchNorm"]
"""Of all modules and tasks."""
