// Functions of the driver that PyTorch asks for by name and that no test calls. In C, where a name has no type.
#define UNUSED(name) \
  __attribute__((visibility("default"))) int name(void) { return 801; /* CUDA_ERROR_NOT_SUPPORTED */ }
UNUSED(cuFuncGetAttribute)
UNUSED(cuFuncSetAttribute)
UNUSED(cuFuncSetCacheConfig)
UNUSED(cuLaunchCooperativeKernel)
UNUSED(cuLinkAddData_v2)
UNUSED(cuLinkComplete)
UNUSED(cuLinkCreate_v2)
UNUSED(cuModuleLoad)
UNUSED(cuModuleLoadDataEx)
UNUSED(cuModuleUnload)
UNUSED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
UNUSED(cuPointerGetAttribute)
UNUSED(cuTensorMapEncodeTiled)
