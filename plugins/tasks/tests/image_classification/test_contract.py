"""Image classification keeps the laws from its side, with each kind of model."""

from typing import ClassVar

from distcore.testing import TaskContract


class TestConvNet(TaskContract):
    task = "image-classification"
    settings: ClassVar = {"task_options.dropout": 0.1}


class TestTransformer(TaskContract):
    task = "image-classification"
    settings: ClassVar = {"task_options.model": "vit-tiny", "task_options.augment.flip": True}


class TestResNet(TaskContract):
    task = "image-classification"
    settings: ClassVar = {"task_options.model": "resnet-tiny"}
