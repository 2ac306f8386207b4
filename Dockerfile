# One image for the service and for every Ray node, so that both run the same code with the same packages.
# It installs what `make setup` installs, without the development tools; tests/deploy/ keeps the two in step.
#
#   docker build -t eth-service:0.1.0 .
#   docker build -t eth-service:0.1.0 --build-arg BASE=<image with CANN and Python 3.11> --build-arg EXTRAS=npu .
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
ARG EXTRAS=
RUN python3 -m venv /opt/eth
WORKDIR /src
# The packages first, without our sources, so that a change of ours does not install torch again.
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN /opt/eth/bin/python -m pip install --no-cache-dir -c constraints.txt ".${EXTRAS:+[$EXTRAS]}"
COPY planner planner
COPY actors actors
COPY eth_service eth_service
RUN /opt/eth/bin/python -m pip install --no-cache-dir --no-deps --force-reinstall .

FROM ${BASE}
# KubeRay's health probes call wget inside the container.
RUN apt-get update && apt-get install -y --no-install-recommends wget && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 eth && install -d -o eth -g eth /data
COPY --from=build /opt/eth /opt/eth
# Without the second line NVIDIA's container runtime mounts nvidia-smi but no CUDA driver.
ENV PATH=/opt/eth/bin:$PATH \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
# A number, because Kubernetes' runAsNonRoot cannot judge a name.
USER 10001
# Jobs' paths start here and run folders are written here: mount a volume.
WORKDIR /data
# Not 8080, `eth serve`'s own choice: there KubeRay has Ray export its metrics.
EXPOSE 8000
# `eth serve` listens on loopback only, so publishing the port is not enough to reach it: see deploy/README.md.
CMD ["/opt/eth/bin/eth", "serve", "--port", "8000"]
