"""The Python of the pages in docs/ runs. A page's blocks run in order and share their names; the pages in FRESH take
things as given, which are made here anew for each block."""

from __future__ import annotations

import pathlib
import re

import card
import hosts
import pytest
import support as s
import torch

import stagehand

ROOT = pathlib.Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
FRESH = {"accelerate", "coming-from", "diffusers", "distributed", "lightning", "peft", "transformers"}
CODE = {page.stem: BLOCK.findall(page.read_text()) for page in sorted((ROOT / "docs").glob("*.md"))}
ALONE = [(page, number) for page in sorted(FRESH) for number in range(len(CODE[page]))]
TOGETHER = [page for page, blocks in CODE.items() if blocks and page not in FRESH]


@pytest.fixture(autouse=True)
def one_thread():
    with s.threads(1):
        yield


def needed(*names: str) -> None:
    for name in names:
        pytest.importorskip(name, reason=f"{name} is not installed: make test-hosts installs it")


def of_trainers(folder: pathlib.Path, block: str) -> dict:
    """A model of transformers and the data to train it, in the names that the pages use."""
    needed("transformers", "accelerate", "peft")
    import test_trainers as t
    hosts.llama().save_pretrained(folder / "folder")
    data = t.Sentences()
    given = {"model": hosts.llama() if "get_peft_model" in block else t.adapted(), "args": t.arguments(folder),
             "data": data, "folder": folder / "folder", "on_the_host": not card.ON_CARD,
             "loader": torch.utils.data.DataLoader(data, batch_size=2), "input_ids": data[0]["input_ids"][None],
             "accelerator": "gpu" if card.ON_CARD else "cpu"}
    if "lightning" in block:
        needed("lightning")
        given["module"] = lightning_module(given["model"])
    if "trl" in block:
        given.update(of_trl(folder))
    return given


def lightning_module(model):
    import lightning.pytorch as pl

    class Words(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model

        def training_step(self, batch, number):
            return self.net(**batch).loss

        def configure_optimizers(self):
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad])

    return Words()


def of_trl(folder: pathlib.Path) -> dict:
    needed("trl", "datasets")
    import datasets
    import test_trl
    import trl

    return {"model": hosts.llama(), "lora": test_trl.lora(), "tokenizer": test_trl.tokenizer(),
            "texts": datasets.Dataset.from_dict(test_trl.TEXTS),
            "sft_args": trl.SFTConfig(output_dir=str(folder), max_steps=1, report_to=[], save_strategy="no", bf16=False,
                                      use_cpu=not card.ON_CARD)}


def of_diffusers(folder: pathlib.Path, block: str) -> dict:
    needed("diffusers", "transformers")
    if "WanPipeline" in block:
        hosts.made("wan22").save_pretrained(folder)
    given = {"pipe": hosts.sd(), "options": {"num_inference_steps": 1, "height": 32, "width": 32}, "folder": folder}
    if "controlnet=" in block:
        from diffusers import ControlNetModel

        unet = given["pipe"].unet
        given["controlnet"] = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(16, 32))
    return given


def of_ranks(folder: pathlib.Path, block: str) -> dict:
    """One process that is a group by itself."""
    model = s.made(s.Stack, 2, 64, frozen=False)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return {"model": model, "optimizer": stagehand.OffloadedAdamW(model.parameters(), lr=1e-3),
            "batches": [torch.randn(2, 64, device=card.TORCH)]}


def of_others(folder: pathlib.Path, block: str) -> dict:
    return {"model": s.made(s.Stack, 2, 64)}


GIVEN = {"coming-from": of_others, "diffusers": of_diffusers, "distributed": of_ranks}


@pytest.mark.parametrize("page,number", ALONE, ids=[f"{page}-{number}" for page, number in ALONE])
def test_a_block_of_a_page_runs(page, number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    block = CODE[page][number]
    names = GIVEN.get(page, of_trainers)(tmp_path, block)
    try:
        exec(compile(block, f"docs/{page}.md", "exec"), names)
        if "shutdown" not in block and "module" not in names and "pipe" not in names:  # plain again, or several
            model = names["trainer"].model if "trainer" in names else names["model"]
            assert stagehand.runtime(model).device == card.TORCH
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize("page", TOGETHER)
def test_the_blocks_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    needed(*re.findall(r"^import (transformers|diffusers|peft)$", "\n".join(CODE[page]), re.MULTILINE))
    for block in CODE[page]:
        exec(compile(block, f"docs/{page}.md", "exec"), names)


def test_pages_with_code_are_found():
    assert set(FRESH) <= {page for page, blocks in CODE.items() if blocks}
    assert "start" in TOGETHER and len(ALONE) >= 10
