"""Training under accelerate, transformers' Trainer and Lightning: the part of test_launchers.py that each rank runs.
One process with as many parts in an accumulation as there are ranks runs the same, and gets the same weights."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys

import torch

import stagehand

WORLD = 2
BUILDS = ("adapted", "whole")
OPTIMIZERS = {"adapted": torch.optim.AdamW, "whole": stagehand.OffloadedAdamW}


def made(build: str, managed: bool):
    """A small language model, with adapters or trained as a whole; with managed under stagehand."""
    import support as s
    import test_trainers as t

    model = getattr(t, build)()
    if not managed:
        return s.aligned_copy(model)
    budget = t.budget_of(model)
    return stagehand.layer(model, vram_budget=budget, device=s.device(budget))


def weights_of(model) -> dict:
    return {name.replace("module.", ""): param.detach().clone() for name, param in model.named_parameters()}


# ---------------------------------------------------------------------- a loop of accelerate


def by_accelerate(build: str, folder: pathlib.Path, managed: bool, parts: int, resumes: bool = False) -> dict:
    """Two epochs, with the state saved between them; the second alone, from that state, with `resumes`."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=parts)
    model = made(build, managed)
    optimizer = OPTIMIZERS[build]([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    data = torch.randint(5, 300, (12, 9), generator=torch.Generator().manual_seed(2))
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=2))
    if resumes:
        accelerator.load_state(folder)
    for epoch in range(resumes, 2):
        for ids in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=ids, labels=ids).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        if not (resumes or epoch):
            accelerator.save_state(folder)
    inner = accelerator.unwrap_model(model)
    return {"weights": weights_of(inner), "ranks": accelerator.num_processes,
            "streamed": stagehand.runtime(inner).plan["bytes_per_step"] if managed else 0}


# ---------------------------------------------------------------------- transformers' Trainer


def by_trainer(build: str, folder: pathlib.Path, managed: bool, parts: int, resumes: bool = False) -> dict:
    """Four steps, with a checkpoint behind the second; the last two alone with `resumes`."""
    import support as s
    import test_trainers as t
    from transformers import Trainer

    model = getattr(t, build)()
    args = t.arguments(folder, gradient_accumulation_steps=parts, save_strategy="steps", save_steps=2,
                       max_grad_norm=0.1, ddp_backend="gloo" if "RANK" in os.environ else None)
    extra = {}
    if managed:
        extra["callbacks"] = [t.callback_for(model)]
    else:
        model = s.aligned_copy(model)
    if build == "whole":
        extra["optimizer_cls_and_kwargs"] = t.offloaded_adamw(args)
    torch.manual_seed(0)
    trainer = Trainer(model=model, args=args, train_dataset=t.Sentences(16), **extra)
    torch.manual_seed(0)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resumes else None)
    return {"weights": weights_of(model), "ranks": args.world_size,
            "streamed": stagehand.runtime(model).plan["bytes_per_step"] if managed else 0}


# ---------------------------------------------------------------------- Lightning


def by_lightning(build: str, folder: pathlib.Path, managed: bool, parts: int, resumes: bool = False) -> dict:
    """Two epochs, with a checkpoint between them; the second alone with `resumes`. And predictions."""
    import hosts
    import test_lightning as t
    from test_trainers import adapted

    from stagehand.integrations.lightning import StagehandDDPStrategy

    module = t.Words({"adapted": adapted, "whole": hosts.llama}[build], OPTIMIZERS[build])
    ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    data = torch.randint(5, 300, (WORLD * 3, 2, 9), generator=torch.Generator().manual_seed(2))  # batches
    loader = torch.utils.data.DataLoader(data[rank::ranks], batch_size=None)

    def trainer(epochs):
        if not managed:
            chosen = t.Plain(torch.device("cpu"))
        elif ranks > 1:
            budget = t.s.nbytes(module.net) * 3 // 4 + 40_000
            chosen = StagehandDDPStrategy(vram_budget=budget)
        else:
            chosen = t.strategy(module.net)
        return t.trainer(folder, strategy=chosen, devices=ranks, max_epochs=epochs, accumulate_grad_batches=parts,
                         use_distributed_sampler=False)

    if not resumes:
        first = trainer(1)
        first.fit(module, loader)
        first.save_checkpoint(folder / "half.ckpt")
    trainer(2).fit(module, loader, ckpt_path=folder / "half.ckpt", weights_only=False)
    predicted = trainer(1).predict(module, loader)
    return {"weights": weights_of(module), "ranks": ranks, "streamed": module.seen[-1] if managed else 0,
            "predicted": torch.stack(predicted)}


RUNS = {"accelerate": by_accelerate, "trainer": by_trainer}
if importlib.util.find_spec("lightning"):
    RUNS["lightning"] = by_lightning


def train(out: str, *names: str) -> None:
    found = {}
    for name in names:
        for build in BUILDS:
            folder = pathlib.Path(out, f"{name} {build}")
            for resumes in (False, True):
                found[name, build, resumes] = RUNS[name](build, folder, True, 1, resumes)
    torch.save(found, pathlib.Path(out, f"{os.environ['RANK']}.pt"))


def fails(where: str) -> None:
    """The second rank: its budget is too small, or its second backward raises an error."""
    import ddp_ranks as d

    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    model = d.managed(share=0.01 if rank and where == "budget" else 0.6)

    def hook(grad):
        raise ZeroDivisionError(f"rank {rank} fails")

    ddp = torch.nn.parallel.DistributedDataParallel(model)
    for step in range(2):
        out = ddp(d.batch(0, rank, WORLD))
        if rank and step and where == "backward":
            out.register_hook(hook)
        out.sum().backward()


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](*sys.argv[2:])
