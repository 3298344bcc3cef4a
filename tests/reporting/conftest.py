"""W&B without a server and without files outside of the tests' folders."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def quiet_wandb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        for kind in ("CONFIG", "CACHE", "DATA", "ARTIFACT"):
            patch.setenv(f"WANDB_{kind}_DIR", str(tmp_path_factory.mktemp(f"wandb_{kind.lower()}")))
        yield
        import wandb

        wandb.teardown()
