"""Put the checkpoint folder together from a training run, measure it on the CPU, write the card.

    python -m glm5q.tiny.card --run DIR --data DIR [--windows 12]

`--run` holds what train.py wrote, `--data` what collect.py wrote.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from glm5q.tiny import path
from glm5q.tiny.check import compare, own_logits
from glm5q.tiny.collect import SPECIAL
from glm5q.tiny.evaluate import windows
from glm5q.tiny.export import config
from glm5q.tiny.model import Shape
from glm5q.tiny.texts import documents, write
from glm5q.tiny.trigram import cross_entropy

TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] }}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


def write_json(file: Path, value: object) -> None:
    """Indented JSON with a final newline."""
    file.write_text(json.dumps(value, indent=1) + "\n")


def assemble(run: Path, data: Path, out: Path) -> dict[str, object]:
    """Everything but the card -> counts of the shipped text."""
    for old in out.glob("model-*.safetensors"):
        old.unlink()
    for file in [
        *run.glob("model-*.safetensors"),
        run / "model.safetensors.index.json",
        data / "tokenizer.json",
    ]:
        shutil.copyfile(file, out / file.name)
    s = Shape()
    write_json(out / "config.json", config(s))
    write_json(
        out / "generation_config.json",
        {"_from_model_config": True, "bos_token_id": 0, "eos_token_id": [0], "pad_token_id": 0},
    )
    write_json(
        out / "tokenizer_config.json",
        {
            "added_tokens_decoder": {
                str(i): {
                    "content": t,
                    "lstrip": False,
                    "normalized": False,
                    "rstrip": False,
                    "single_word": False,
                    "special": True,
                }
                for i, t in enumerate(SPECIAL)
            },
            "bos_token": SPECIAL[0],
            "eos_token": SPECIAL[0],
            "pad_token": SPECIAL[0],
            "additional_special_tokens": list(SPECIAL[1:]),
            "chat_template": TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "model_max_length": s.positions,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    (out / "chat_template.jinja").write_text(TEMPLATE)
    write_json(
        out / "special_tokens_map.json",
        {
            "bos_token": SPECIAL[0],
            "eos_token": SPECIAL[0],
            "pad_token": SPECIAL[0],
            "additional_special_tokens": list(SPECIAL[1:]),
        },
    )
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    return {
        "calibration.jsonl": write(
            out / "calibration.jsonl", documents(data / "train_text.jsonl", tokenizer, 3, 560_000)
        ),
        "heldout.jsonl": write(
            out / "heldout.jsonl", documents(data / "heldout_text.jsonl", tokenizer, 4, 560_000)
        ),
    }


def shipped_loss(folder: Path, most: int) -> dict[str, float]:
    """Cross-entropy over windows of the shipped held-out text, sparse and dense, eps 1e-5."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [json.loads(line)["text"] for line in (folder / "heldout.jsonl").open()]
    ids = [
        i
        for item in tokenizer.encode_batch(texts, add_special_tokens=False)
        for i in [*item.ids, 0]
    ]
    held = windows(np.asarray(ids, dtype=np.uint16), Shape().positions, most)
    out: dict[str, float] = {"windows": len(held)}
    for mode in ("sparse", "dense"):
        logits = own_logits(folder, held[:, :-1], 1e-5, mode)
        out[mode] = torch.nn.functional.cross_entropy(logits.transpose(1, 2), held[:, 1:]).item()
    return out


def bars(card: dict[str, Any]) -> dict[str, dict[str, object]]:
    """Each bar with its number and whether it is met."""
    held, check, far = card["heldout"], card["transformers"], card["recall"][0]
    gap = abs(held["cross_entropy_dense"] - held["cross_entropy_sparse"])
    gain = card["trigram_cross_entropy"] - held["cross_entropy_sparse"]
    same = check["latent_eps_1e-06"]
    apart = abs(same["cross_entropy"] - check["cross_entropy_transformers"])
    return {
        "dense and sparse within 0.02 nat": {"value": round(gap, 4), "met": gap <= 0.02},
        "least expert load at least 0.25 of the mean": {
            "value": min(held["load_min"]),
            "met": min(held["load_min"]) >= 0.25,
        },
        "1 nat better than an interpolated trigram": {"value": round(gain, 3), "met": gain >= 1},
        "recall over 3000 tokens at least 90 %, most recent keys near chance": {
            "value": [round(far["sparse"], 4), round(far["recent"], 4)],
            "met": far["sparse"] >= 0.9 and far["recent_digit"] <= 0.2,
        },
        "transformers gives the same loss to 4 decimals": {
            "value": round(apart, 6),
            "met": apart < 1e-4,
        },
    }


def readme(card: dict[str, Any]) -> str:
    """The model card, from its template."""
    check, train, recall = card["transformers"], card["training"], card["recall"]
    counts = {k: v / 1e6 for k, v in train["tokens"].items()}
    return (
        (path() / "README.template.md")
        .read_text()
        .format(
            **{
                k: card[k]
                for k in (
                    "weight_bytes",
                    "index_topk",
                    "trigram_cross_entropy",
                    "data",
                    "shipped_heldout",
                )
            },
            millions=card["parameters"] / 1e6,
            held=card["heldout"],
            check=check,
            train=train,
            six=check["latent_eps_1e-06"],
            five=check["latent_eps_1e-05"],
            far=recall[0],
            trained=sum(counts.values()),
            short=counts["dense_short"],
            dense=counts["dense"],
            sparse=counts["sparse"],
            bar_rows="\n".join(
                f"| {name} | {bar['value']} | {'yes' if bar['met'] else 'no'} |"
                for name, bar in card["bars"].items()
            ),
            recall_rows="\n".join(
                f"| {r['distance']} | {r['sparse']:.3f} | {r['dense']:.3f} | {r['recent']:.3f} "
                f"| {r['sparse_digit']:.3f} | {r['recent_digit']:.3f} |"
                for r in recall
            ),
            source_rows="\n".join(
                f"| {name} | {s['licence']} | {s['bytes'] / 1e6:.1f} |"
                for name, s in sorted(card["data"]["sources"].items())
            ),
        )
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=12)
    args = parser.parse_args()
    out = path()
    shipped = assemble(args.run, args.data, out)
    numbers = json.loads((args.run / "train.json").read_text())
    train = np.load(io.BytesIO(lzma.decompress((args.data / "train.npy.xz").read_bytes())))
    test = np.load(args.data / "heldout.npy")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    size = int(index["metadata"]["total_size"])
    held = numbers["heldout"]
    card: dict[str, Any] = {
        "parameters": (size - 4 * 16 * 5) // 2 + 16 * 5,
        "weight_bytes": size,
        "index_topk": Shape().index_topk,
        "heldout": held,
        "recall": numbers["recall"],
        "trigram_cross_entropy": cross_entropy(
            train, test[: held["windows"] * held["length"] + 1], Shape().vocab
        ),
        "training": {k: numbers[k] for k in ("steps", "tokens", "seconds", "device")},
        "data": json.loads((args.data / "data.json").read_text()),
        "shipped_text": shipped,
        "transformers": compare(out, test, Shape().positions, args.windows),
        "shipped_heldout": shipped_loss(out, args.windows),
    }
    card["bars"] = bars(card)
    write_json(out / "card.json", card)
    (out / "README.md").write_text(readme(card))
    print(json.dumps(card["bars"], indent=1))


if __name__ == "__main__":
    main()
