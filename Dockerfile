# duotone with CUDA kernels: docker build -t duotone . && docker run --gpus all duotone compare
# NVRTC compiles the kernels on first use; its wheels come with torch and cuda-core.
FROM python:3.12-slim
WORKDIR /opt/duotone
COPY pyproject.toml constraints.txt README.md LICENSE MANIFEST.in ./
COPY src src
RUN pip install --no-cache-dir -c constraints.txt ".[cuda,triton,eval]" \
    && useradd --create-home duotone
USER duotone
WORKDIR /home/duotone
ENTRYPOINT ["duotone"]
CMD ["compare"]
