# Training with VLM-RB on an NVIDIA GPU (driver 580 or newer), or on the CPU. How to build and run: docs/docker.md.
#
# CUDA 13.0 is what PyTorch 2.14's wheels are built for. They bring most CUDA libraries themselves, so a
# `-base-` image is enough for training alone: --build-arg CUDA_IMAGE=nvidia/cuda:13.0.3-base-ubuntu24.04
ARG CUDA_IMAGE=nvidia/cuda:13.0.3-runtime-ubuntu24.04
FROM ${CUDA_IMAGE}

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# libegl1, libgl1, libgl1-mesa-dri, libopengl0, libosmesa6: MuJoCo's renderers, on the GPU and in software. tini: process
# 1, which hands signals on to the trainer (Python as process 1 would ignore SIGTERM) and reaps scorer processes whose
# parent is gone.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv \
        libegl1 libgl1 libgl1-mesa-dri libopengl0 libosmesa6 tini \
    && rm -rf /var/lib/apt/lists/*

# Tells GLVND where NVIDIA's EGL is; the library itself is mounted by the container toolkit (`graphics` below).
COPY docker/10_nvidia.json /usr/share/glvnd/egl_vendor.d/10_nvidia.json

ENV PATH=/opt/vlmrb/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    MPLBACKEND=Agg \
    MUJOCO_GL=egl \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility,graphics \
    HF_HOME=/cache/huggingface \
    USER=vlmrb

# Dependencies first, from pyproject.toml and an empty package: this layer of several GB stays while the source changes.
# build/ must go, or its newer, empty __init__.py would win over the real one.
WORKDIR /app
# hadolint's DL3013 asks for versions of what pip installs: pyproject.toml holds them.
ARG EXTRAS=vlm,server,remote
COPY pyproject.toml ./
# hadolint ignore=DL3013
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -m venv /opt/vlmrb \
    && mkdir -p src/vlmrb \
    && touch src/vlmrb/__init__.py README.md LICENSE \
    && pip install ".[${EXTRAS}]" \
    && rm -rf build src

COPY LICENSE README.md ./
COPY src src
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --no-deps --force-reinstall . \
    && rm -rf build
COPY configs configs
COPY benchmarks benchmarks
COPY docker/entrypoint.sh docker/entrypoint.sh

# Ubuntu's image has a user of its own with id 1000, the id that most people have on their machine. The two folders are
# open to any user (sticky, like /tmp), so that `--user` works with volumes as well.
ARG UID=1000
RUN if id ubuntu > /dev/null 2>&1; then userdel --remove ubuntu; fi \
    && useradd --create-home --no-log-init --uid "${UID}" "${USER}" \
    && install --directory --mode=1777 --owner="${USER}" --group="${USER}" runs "${HF_HOME}"
USER ${UID}
VOLUME ["/app/runs", "/cache/huggingface"]

ENTRYPOINT ["tini", "--", "/app/docker/entrypoint.sh"]
CMD ["--help"]
