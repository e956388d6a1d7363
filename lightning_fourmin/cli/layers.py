"""The layers of a net with their parameters, as a table in the terminal."""

from typing import Any

from lightning.pytorch.callbacks import RichModelSummary
from typing_extensions import override


class LayerTable(RichModelSummary):
    """Lightning's summary without metrics, layers that have no parameters, and figures that it does not know."""

    def __init__(self, max_depth: int = 2) -> None:
        super().__init__(max_depth)

    @staticmethod
    @override
    def summarize(
        summary_data: list[tuple[str, list[str]]], total_parameters: int, *args: Any, **summarize_kwargs: Any
    ) -> None:
        from rich import box, get_console
        from rich.table import Table

        columns = dict(summary_data)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("layer")
        table.add_column("type")
        table.add_column("parameters", justify="right")
        for name, kind, num_parameters in zip(columns["Name"], columns["Type"], columns["Params"], strict=True):
            if num_parameters.strip() != "0" and "." in name:
                table.add_row(name.partition(".")[2], kind, num_parameters)
        table.add_section()
        table.add_row("all", "", f"{total_parameters:,d}")
        get_console().print(table)
