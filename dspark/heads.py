"""The two heads that make a DFlash backbone a DSpark drafter (arXiv 2607.05147, section 3.1).

Shapes: B blocks, n slots, H hidden, r Markov rank, V target vocabulary, D draft vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.config import DSparkConfig


class MarkovHead(nn.Module):
    """Bias on slot k's logits from the token before it: B(x_{k-1}, .) = m_k W2, with m_k = W1[x_{k-1}] (vanilla).

    W1 [V, r] is indexed by target ids, W2 [D, r] (stored as a Linear's weight) gives draft columns. Two variants
    shape m_k by the backbone's hidden state h_k:
      gated: m_k = sigmoid(Wg [h_k; W1[x]] + b) * W1[x]
      rnn:   (g, c, o) = Wr [s; W1[x]; h_k] + b;  s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c);  m_k = tanh(o)
    with s_0 = 0. The names of the parameters are DeepSpec's and speculators'.
    """

    def __init__(self, config: DSparkConfig):
        super().__init__()
        rank, hidden = config.markov_rank, config.hidden_size
        self.kind = config.markov_head_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.vocab_size_out, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)
        nn.init.normal_(self.markov_w1.weight, std=0.02)
        nn.init.zeros_(self.markov_w2.weight)  # starts as no bias at all: the drafter begins as plain DFlash

    def initial_state(self, batch: int) -> Tensor | None:
        """s_0 [B, r] of the rnn head; None for the stateless ones."""
        weight = self.markov_w1.weight
        return weight.new_zeros(batch, weight.shape[1]) if self.kind == "rnn" else None

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One slot: previous target ids [..., ], hidden [..., H] -> m_k [..., r] and the next state."""
        w1 = self.markov_w1(previous)
        if self.kind == "vanilla":
            return w1, None
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, w1.to(hidden.dtype)], -1))) * w1, None
        joined = torch.cat([state.to(hidden.dtype), w1.to(hidden.dtype), hidden], -1)
        gate, candidate, out = self.joint_proj(joined).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return torch.tanh(out), gate * state + (1 - gate) * torch.tanh(candidate)

    def forward(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """Teacher-forced: previous [B, n] target ids before each slot, hidden [B, n, H] -> m [B, n, r]."""
        if self.kind != "rnn":
            return self.step(previous, hidden, None)[0]
        state, out = self.initial_state(previous.shape[0]), []
        for k in range(previous.shape[1]):
            m, state = self.step(previous[:, k], hidden[:, k], state)
            out.append(m)
        return torch.stack(out, 1)

    def bias(self, m: Tensor) -> Tensor:
        """[..., r] -> [..., D]."""
        return self.markov_w2(m)


class ConfidenceHead(nn.Module):
    """c_k = sigmoid(w . [h_k; W1[x_{k-1}]] + b): chance that draft k survives given that all before it did.

    Returns the logit; without the Markov embedding where `confidence_head_with_markov` is off.
    """

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        width = config.hidden_size + (config.markov_rank if self.with_markov else 0)
        self.proj = nn.Linear(width, 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(self, hidden: Tensor, w1: Tensor | None) -> Tensor:
        """hidden [..., H], w1 = W1[x_{k-1}] [..., r] -> logit [...], float32 as served by vLLM."""
        features = torch.cat([hidden, w1.to(hidden.dtype)], -1) if self.with_markov else hidden
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(features.float(), self.proj.weight.float(), self.proj.bias.float()).squeeze(-1)
