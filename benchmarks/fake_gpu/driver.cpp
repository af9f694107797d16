// A libcuda.so.1 whose functions do nothing: torch and Triton look names up in it.
extern "C" {

int cudaDeviceGetAttribute(int* value, int attribute, int device);  // of runtime.cpp; drivers number attributes as the runtime does

int cuDeviceGetAttribute(int* value, int attribute, int device) { return cudaDeviceGetAttribute(value, attribute, device); }
int cuFuncGetAttribute(int* value, int attribute, void*) {
  constexpr int kMostThreadsPerBlock = 0;
  *value = attribute == kMostThreadsPerBlock ? 1024 : 0;
  return 0;
}
int cuCtxGetCurrent(void** context) {
  static int made = 0;
  *context = &made;
  return 0;
}
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = 1;
  return 0;
}
int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
int cuGetErrorName(int, const char** text) {
  *text = "an error of the fake GPU";
  return 0;
}
int cuGetErrorString(int code, const char** text) { return cuGetErrorName(code, text); }

#define ACCEPTED(name) \
  int name(...) { return 0; }
ACCEPTED(cuCtxGetLimit)
ACCEPTED(cuCtxSetCurrent)
ACCEPTED(cuCtxSetLimit)
ACCEPTED(cuDeviceGet)
ACCEPTED(cuDeviceGetCount)
ACCEPTED(cuDeviceGetUuid)
ACCEPTED(cuDevicePrimaryCtxRetain)
ACCEPTED(cuFuncSetAttribute)
ACCEPTED(cuFuncSetCacheConfig)
ACCEPTED(cuInit)
ACCEPTED(cuLaunchCooperativeKernel)
ACCEPTED(cuLaunchKernel)
ACCEPTED(cuLaunchKernelEx)
ACCEPTED(cuLinkAddData_v2)
ACCEPTED(cuLinkComplete)
ACCEPTED(cuLinkCreate_v2)
ACCEPTED(cuMemGetAddressRange_v2)
ACCEPTED(cuModuleGetFunction)
ACCEPTED(cuModuleLoad)
ACCEPTED(cuModuleLoadData)
ACCEPTED(cuModuleLoadDataEx)
ACCEPTED(cuModuleUnload)
ACCEPTED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
ACCEPTED(cuOccupancyMaxActiveClusters)
ACCEPTED(cuPointerGetAttribute)
ACCEPTED(cuPointerGetAttributes)
ACCEPTED(cuTensorMapEncodeTiled)
}
