"""A small Llama that decodes one token per sequence with a static KV cache; its attention may break a CUDA graph.

Loads the weights of a GGUF file of the Llama architecture, or makes random ones.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from weakref_ext.cudagraph import eager_break


@dataclass(frozen=True)
class Config:
    """The sizes of a Llama. Defaults: SmolLM2-135M."""

    vocab: int = 49152
    hidden: int = 576
    layers: int = 30
    heads: int = 9
    kv_heads: int = 3
    intermediate: int = 1536
    rope_theta: float = 100_000.0
    eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


TINY = Config(vocab=128, hidden=64, layers=6, heads=4, kv_heads=2, intermediate=96)


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight, by the names of a GGUF file. The output head is the embedding."""
    hidden, kv = config.hidden, config.kv_heads * config.head_dim
    layer = {
        "attn_norm": (hidden,),
        "attn_q": (hidden, hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
        "attn_output": (hidden, hidden),
        "ffn_norm": (hidden,),
        "ffn_gate": (config.intermediate, hidden),
        "ffn_up": (config.intermediate, hidden),
        "ffn_down": (hidden, config.intermediate),
    }
    weights = {f"blk.{i}.{name}.weight": shape for i in range(config.layers) for name, shape in layer.items()}
    return {"token_embd.weight": (config.vocab, hidden), "output_norm.weight": (hidden,), **weights}


def random_weights(config: Config, seed: int = 0) -> dict[str, torch.Tensor]:
    """Seeded weights, the same on every machine."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) / math.sqrt(shape[-1])
        for name, shape in shapes(config).items()
    }


def read_gguf(path: str) -> tuple[Config, dict[str, torch.Tensor]]:
    """Configuration and dequantized weights (float32) of a GGUF file with a Llama in it. Needs the package ``gguf``."""
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(path)

    def value(name: str) -> float:
        return reader.fields[f"llama.{name}"].contents()

    weights = {
        tensor.name: torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()) for tensor in reader.tensors
    }
    config = Config(
        vocab=len(weights["token_embd.weight"]),
        hidden=int(value("embedding_length")),
        layers=int(value("block_count")),
        heads=int(value("attention.head_count")),
        kv_heads=int(value("attention.head_count_kv")),
        intermediate=int(value("feed_forward_length")),
        rope_theta=value("rope.freq_base"),
        eps=value("attention.layer_norm_rms_epsilon"),
    )
    for name, tensor in weights.items():
        heads = config.heads if "attn_q" in name else config.kv_heads if "attn_k." in name else 0
        if heads:  # GGUF interleaves the two halves of a rotated head; undo that
            rows = tensor.view(heads, config.head_dim // 2, 2, -1)
            weights[name] = rows.transpose(1, 2).reshape(tensor.shape)
    return config, {name: weights[name] for name in shapes(config)}


class Llama:
    """``model(tokens, positions)``: one decoding step.

    Args of a call: ``tokens``, ``positions``: int64 [batch]. Returns ``(hidden, [aux, aux, aux])``: the last layer's
    normalised output and the outputs of three layers on the way, [batch, hidden], as EAGLE3 drafters consume them.
    """

    def __init__(
        self, config: Config, weights: dict[str, torch.Tensor], max_batch: int, context: int, device: str
    ) -> None:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.config = config
        self.weights = {name: weight.to(device, dtype) for name, weight in weights.items()}
        self.cache = torch.zeros(
            config.layers, 2, max_batch, config.kv_heads, context, config.head_dim, device=device, dtype=dtype
        )
        self.rows = torch.arange(max_batch, device=device)
        self.slots = torch.arange(context, device=device)
        half = torch.arange(0, config.head_dim, 2, device=device) / config.head_dim
        angles = self.slots[:, None] / config.rope_theta ** half[None]
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        # after an early, a middle and a late layer
        self.aux_layers = (1, config.layers // 2, config.layers - 2)

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        x = self.weights["token_embd.weight"][tokens]
        aux = []
        for layer in range(self.config.layers):
            x = x + self._attention(layer, self._norm(x, f"blk.{layer}.attn_norm"), positions)
            x = x + self._mlp(layer, self._norm(x, f"blk.{layer}.ffn_norm"))
            if layer in self.aux_layers:
                aux.append(x)
        return self._norm(x, "output_norm"), aux

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[batch, hidden] to [batch, vocab]."""
        return F.linear(hidden, self.weights["token_embd.weight"])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.config.eps)

    def _linear(self, x: torch.Tensor, layer: int, name: str) -> torch.Tensor:
        return F.linear(x, self.weights[f"blk.{layer}.{name}.weight"])

    def _mlp(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        gate, up = self._linear(x, layer, "ffn_gate"), self._linear(x, layer, "ffn_up")
        return self._linear(F.silu(gate) * up, layer, "ffn_down")

    def _attention(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        heads = [
            self._linear(x, layer, name).view(len(x), -1, self.config.head_dim)
            for name in ("attn_q", "attn_k", "attn_v")
        ]
        out = attend(self, layer, *heads, positions)
        return self._linear(out, layer, "attn_output")

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


@eager_break
def attend(
    model: Llama, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Write k and v, [batch, kv_heads, head_dim], to the cache; attend from q, [batch, heads, head_dim], to it.

    Returns [batch, heads * head_dim].
    """
    batch, heads, width = q.shape
    keys, values = model.cache[layer, :, :batch]
    keys[model.rows[:batch], :, positions] = model.rotate(k, positions)
    values[model.rows[:batch], :, positions] = v
    grouped = model.rotate(q, positions).view(batch, k.shape[1], heads // k.shape[1], width)
    scores = (grouped @ keys.transpose(-1, -2)).float() / math.sqrt(width)
    unseen = model.slots[None] > positions[:, None]
    scores = scores.masked_fill(unseen[:, None, None], float("-inf"))
    return (scores.softmax(dim=-1).to(q.dtype) @ values).reshape(batch, heads * width)
