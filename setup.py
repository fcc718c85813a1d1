import runpy
from pathlib import Path

from setuptools import find_packages, setup

DISTRIBUTION = runpy.run_path("lion/distribution.py")

EXTRAS = {
    "convert": ["safetensors"],
    "digits": ["scikit-learn", "scipy"],
    "glue": ["scikit-learn", "scipy"],
    "onnx": ["onnx", "onnxruntime", "onnxscript"],
    "paper": ["matplotlib", "scipy"],
    "plots": ["matplotlib"],
    "timm": ["timm>=1.0.26"],
    "transformers": ["transformers>=5.23"],
    "dev": ["accelerate", "mypy", "peft", "pytest", "pytest-xdist", "ruff"],
}

# What a wheel holds in the folder `lion/clone`, so that site-packages gets no top-level `data` or `tools`.
CLONE = ("data", "tools", "recipes")

setup(
    name=DISTRIBUTION["NAME"],
    version=DISTRIBUTION["VERSION"],
    description="Linear attention for bidirectional sequence modelling: full attention, chunks and an RNN",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.11",
    packages=[
        *find_packages(include=["lion", "lion.*"]),
        *(f"lion.clone.{name}" for name in find_packages(include=["data", "data.*", "tools", "tools.*"])),
        "lion.clone.recipes",
    ],
    package_dir={f"lion.clone.{name}": name for name in CLONE},
    package_data={"lion": ["py.typed"]} | {f"lion.clone.{name}": ["**/*.yaml"] for name in CLONE},
    entry_points={"console_scripts": ["lion = lion.__main__:main"]},
    install_requires=["torch>=2.11", "torchvision", "datasets", "tokenizers", "numpy", "pyyaml", "tensorboard", "tqdm"],
    extras_require={**EXTRAS, "all": sorted({name for names in EXTRAS.values() for name in names})},
)
