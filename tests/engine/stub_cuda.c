// A libcuda.so.1 without a GPU. It loads every kernel, keeps what a launch would run, and writes the arguments of a
// tensor map into the map. test_plans.py compares planned launches with ordinary launches by it.
#include "cuda.h"
#include <stdlib.h>
#include <string.h>

#define MOST 1024
static int sizes[MOST][128], counts[MOST];
static unsigned long long functions = 0;
static unsigned char log_bytes[1 << 20];
static size_t log_length = 0;

static void put(const void *bytes, size_t size) {
  if (log_length + size <= sizeof(log_bytes)) {
    memcpy(log_bytes + log_length, bytes, size);
    log_length += size;
  }
}

// The bytes of each parameter of a kernel, which a real driver reads from the machine code.
void stub_sizes(unsigned long long function, int count, const int *bytes) {
  counts[function] = count;
  memcpy(sizes[function], bytes, count * sizeof(int));
}

// Copy what was launched since the last call, and forget it.
size_t stub_take(unsigned char *bytes) {
  size_t length = log_length;
  memcpy(bytes, log_bytes, length);
  log_length = 0;
  return length;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **params, void **extra) {
  unsigned long long function = (unsigned long long)f, stream = (unsigned long long)config->hStream;
  unsigned head[] = {config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX, config->blockDimY,
                     config->blockDimZ, config->sharedMemBytes, config->numAttrs};
  put(head, sizeof(head));
  put(&function, sizeof(function));
  put(&stream, sizeof(stream));
  for (unsigned i = 0; i < config->numAttrs; ++i)
    put(&config->attrs[i].id, sizeof(config->attrs[i].id));
  for (int i = 0; i < counts[function]; ++i)
    put(params[i], sizes[function][i]);
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *shape, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  unsigned long long *to = (unsigned long long *)map;
  memset(map, 0, sizeof(*map));
  to[0] = (unsigned long long)address;
  to[1] = type;
  to[2] = rank | swizzle << 8 | promotion << 16 | fill << 24;
  unsigned *sizes_of = (unsigned *)(to + 7);
  for (unsigned i = 0; i < rank && i < 5; ++i) {
    if (i + 1 < rank)
      to[3 + i] = strides[i];
    sizes_of[i] = shape[i];
    sizes_of[5 + i] = box[i];
  }
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *f, CUmodule module, const char *name) {
  *f = (CUfunction)(++functions);
  return functions < MOST ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)1;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR   ? atoi(getenv("STUB_MAJOR"))
           : attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR ? 0
                                                                       : 232448;
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction f) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)value = pointer;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "an error of the stub";
  return CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int *version) {
  *version = 13000;
  return CUDA_SUCCESS;
}
CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *config) { return CUDA_SUCCESS; }
