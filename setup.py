from setuptools import find_packages, setup

EXTRAS = {
    "convert": ["safetensors"],
    "digits": ["scikit-learn", "scipy"],
    "glue": ["scikit-learn", "scipy"],
    "paper": ["matplotlib", "scipy"],
    "plots": ["matplotlib"],
    "dev": ["onnx", "onnxruntime", "onnxscript", "pytest", "pytest-xdist", "ruff", "timm", "transformers"],
}

setup(
    name="lion",
    version="0.1.0",
    description="Linear attention for bidirectional sequence modelling: full attention, chunks and an RNN",
    license="MIT",
    python_requires=">=3.11",
    packages=find_packages(include=["lion", "lion.*"]),  # `data` and `tools` work in a clone only
    install_requires=["torch>=2.11", "torchvision", "datasets", "tokenizers", "numpy", "pyyaml", "tensorboard", "tqdm"],
    extras_require={**EXTRAS, "all": sorted({name for names in EXTRAS.values() for name in names})},
)
