"""A Hydra app of one's own that takes config groups from lightning_fourmin: `python app.py optim=sgd optim.lr=0.1`."""

import hydra
from hydra.utils import instantiate
from lightning.pytorch import Trainer, seed_everything
from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> float:
    seed_everything(1, verbose=False)
    data = instantiate(config.data, _convert_="all")
    optimizer, schedule = (instantiate(part, _convert_="all") for part in (config.optim, config.schedule))
    module = instantiate(config.model, num_classes=data.num_classes, optimizer=optimizer, schedule=schedule)
    trainer = Trainer(
        accelerator="cpu",
        devices=config.devices,
        strategy=instantiate(config.strategy),
        plugins=[instantiate(config.precision)],
        max_epochs=config.max_epochs,
        log_every_n_steps=10,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, data)
    accuracy = float(trainer.callback_metrics["val/top1"])
    print(f"validation accuracy {accuracy:.1%} with {trainer.world_size} ranks")
    return accuracy


if __name__ == "__main__":
    main()
