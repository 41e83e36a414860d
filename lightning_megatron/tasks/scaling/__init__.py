"""Measurement of steps in programs of their own, and the scaling studies of Megatron-LM."""

from lightning_megatron.tasks.scaling.measured_job import measure_job as measure_job
from lightning_megatron.tasks.scaling.scaling_cases import PAPER_REPLICAS as PAPER_REPLICAS
from lightning_megatron.tasks.scaling.scaling_cases import STUDIES as STUDIES
from lightning_megatron.tasks.scaling.scaling_cases import ScalingCase as ScalingCase
from lightning_megatron.tasks.scaling.scaling_cases import Size as Size
from lightning_megatron.tasks.scaling.scaling_cases import Study as Study
from lightning_megatron.tasks.scaling.scaling_cases import cases_of as cases_of
from lightning_megatron.tasks.scaling.scaling_cases import check_replicas as check_replicas
from lightning_megatron.tasks.scaling.scaling_job import ScalingJob as ScalingJob
from lightning_megatron.tasks.scaling.scaling_report import ScalingRow as ScalingRow
from lightning_megatron.tasks.scaling.scaling_report import records_of as records_of
from lightning_megatron.tasks.scaling.scaling_report import table_of as table_of
from lightning_megatron.tasks.scaling.scaling_report import write_files as write_files
