// A device for tests, of torch's kind PrivateUse1. Its memory is main memory that the CPU's operations never see as
// theirs; every operation is computed on the CPU, from copies there and back. It counts memory, copies and waits.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <map>
#include <string>

namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(KIND, 0);
std::map<std::string, int64_t> counts;  // bytes held, their peak; copies from and to the CPU; waits for the device

struct Block {
  void* data;
  int64_t size;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  counts["held"] -= block->size;
  std::free(block->data);
  delete block;
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto* block = new Block{std::malloc(size ? size : 1), static_cast<int64_t>(size)};
    counts["held"] += block->size;
    counts["peak"] = std::max(counts["peak"], counts["held"]);
    return {block->data, block, &release, DEVICE};
  }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};
Memory memory;
REGISTER_ALLOCATOR(KIND, &memory);

// One stream, in which everything is done when the call returns.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = KIND;
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::Stream getDefaultStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { ++counts["waits"]; }
  void synchronizeDevice(const c10::DeviceIndex) const override { ++counts["waits"]; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new double;
    *static_cast<double*>(*event) =
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<double*>(event); }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { ++counts["waits"]; }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    return *static_cast<double*>(end) - *static_cast<double*>(start);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Numbers final : at::CPUGeneratorImpl {
  Numbers() : at::CPUGeneratorImpl(c10::default_rng_seed_val) {
    device_ = DEVICE;
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static const at::Generator generator = at::make_generator<Numbers>();
    return generator;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Numbers>(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto data = memory.allocate(size);
    std::copy_n(static_cast<const char*>(storage.data()), std::min(size, storage.nbytes()),
                static_cast<char*>(data.get()));
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(size);
  }
};

// The same memory as a tensor of the CPU: for copies, and for nothing else.
at::Tensor bare(const at::Tensor& tensor) {
  if (tensor.device().type() != KIND) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &memory, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &memory, keys, c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool) {
  if (self.device().type() != to.device().type()) ++counts["copies"];
  bare(to).copy_(bare(self));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  ++counts["waits"];
  return bare(self).item();
}

// Every other operation. cpu_fallback would take tensors of both devices; a real device refuses them.
void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const auto& tensor = value.toTensor();
    TORCH_CHECK(tensor.device().type() == KIND || tensor.dim() == 0,
                "Expected all tensors to be on the same device, but ", op.schema().name(), " got one on ",
                tensor.device());
  }
  const auto copies = counts["copies"];
  at::native::cpu_fallback(op, stack);
  counts["copies"] = copies;  // these are the simulation's own
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("resize_", TORCH_FN(at::native::resize_));
  m.impl("set_.source_Storage", TORCH_FN(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(softmax, int, fp32)
  KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("start", [] { at::RegisterPrivateUse1HooksInterface(new Hooks()); });
  m.def("counts", [] { return counts; });
  m.def("seed", [](uint64_t number) {
    at::Generator generator = at::globalContext().defaultGenerator(DEVICE);
    generator.set_current_seed(number);
  });
}
