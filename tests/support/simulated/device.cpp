// A device for tests, of torch's kind PrivateUse1. Its memory is main memory that the CPU's operations never see as
// theirs; every operation is computed on the CPU, from copies there and back. It counts memory, copies, waits, and what
// a real device would not survive: races between streams, and memory that is freed while another stream may use it.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
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
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/library.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <string>

namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(KIND, 0);
using Lock = std::lock_guard<std::recursive_mutex>;
std::recursive_mutex mutex;  // of all that follows: a loader, the loop and autograd are threads
std::map<std::string, int64_t> counts;

// Streams do their work at once, but are only ordered as far as events and waits say. A clock maps each stream to how
// many of its operations are done before; what reads a block that was written later, for all it knows, is a race.
using Clock = std::map<int64_t, int64_t>;
thread_local int64_t current = 0;  // the stream of this thread; 0 is the one that computes
thread_local bool inside = false;  // an operation, whose copies are the simulation's own
int64_t streams = 0;
Clock done, host;              // operations of each stream, and those that the host has waited for
std::map<int64_t, Clock> known;  // by stream: what it has waited for

void join(Clock& clock, const Clock& other) {
  for (const auto& [stream, tick] : other) clock[stream] = std::max(clock[stream], tick);
}

Clock clock_of(int64_t stream) {
  Clock clock = known[stream];
  clock[stream] = done[stream];
  return clock;
}

void wait_for(const Clock& clock) {
  ++counts["waits"];
  join(host, clock);
}

struct Block {
  void* data;
  int64_t size, home, writer, written;  // the stream that it was allocated on, that wrote last, and when
  std::set<int64_t> users, recorded;
};

void release(void* context) {
  Lock lock(mutex);
  auto* block = static_cast<Block*>(context);
  for (auto user : block->users) counts["unrecorded"] += user != block->home && !block->recorded.count(user);
  counts["held"] -= block->size;
  std::free(block->data);
  delete block;
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    Lock lock(mutex);
    auto* block = new Block{std::malloc(size ? size : 1), static_cast<int64_t>(size), current, current, 0, {}, {}};
    ++counts["allocations"];
    counts["held"] += block->size;
    counts["peak"] = std::max(counts["peak"], counts["held"]);
    return {block->data, block, &release, DEVICE};
  }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};
Memory memory;
REGISTER_ALLOCATOR(KIND, &memory);

void use(const at::Tensor& tensor, bool writes) {
  Lock lock(mutex);
  auto* block = static_cast<Block*>(tensor.storage().data_ptr().get_context());
  if (block == nullptr) return;
  const auto seen = std::max(known[current][block->writer], host[block->writer]);
  if (block->writer != current && seen < block->written) ++counts["races"];
  block->users.insert(current);
  if (writes) {
    block->writer = current;
    block->written = ++done[current];
  }
}

// Main memory from which, and to which, a copy need not be waited for.
std::map<const char*, size_t> pins;

void unpin(void* data) {
  Lock lock(mutex);
  pins.erase(static_cast<char*>(data));
  std::free(data);
}

bool is_pinned(const void* data) {
  Lock lock(mutex);
  auto after = pins.upper_bound(static_cast<const char*>(data));
  return after != pins.begin() && (--after, static_cast<const char*>(data) < after->first + after->second);
}

struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    Lock lock(mutex);
    auto* data = static_cast<char*>(std::malloc(size ? size : 1));
    pins[data] = std::max<size_t>(size, 1);
    return {data, data, &unpin, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};
Pinned pinned;

c10::Stream stream_of(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, DEVICE, id); }

struct Event {
  int64_t stream;
  Clock clock;
  double time;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = KIND;
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream_of(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    Lock lock(mutex);
    return stream_of(++streams);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream_of(std::exchange(current, stream.id())); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override {
    Lock lock(mutex);
    wait_for(clock_of(stream.id()));
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    Lock lock(mutex);
    wait_for(done);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Lock lock(mutex);
    if (*event == nullptr) *event = new Event;
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    *static_cast<Event*>(*event) = {stream.id(), clock_of(stream.id()),
                                    std::chrono::duration<double, std::milli>(now).count()};
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void block(void* event, const c10::Stream& stream) const override {
    Lock lock(mutex);
    if (event != nullptr) join(known[stream.id()], static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override {
    Lock lock(mutex);
    if (event != nullptr) wait_for(static_cast<Event*>(event)->clock);
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    return static_cast<Event*>(end)->time - static_cast<Event*>(start)->time;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Lock lock(mutex);
    if (data.get_context() != nullptr) static_cast<Block*>(data.get_context())->recorded.insert(stream.id());
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
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
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

// What copies count, beside how many there are: "in" on the stream that computes, "aside" on another; "pageable" those
// that the host must wait for, because their memory is not pinned or they are not asked to go on by themselves.
void count_copy(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  Lock lock(mutex);
  if (to.device().type() == KIND) {
    ++counts[current == 0 ? "in" : "aside"];
    counts["pageable"] += !(non_blocking && is_pinned(from.const_data_ptr()));
  } else {
    ++counts["out"];
    if (!(non_blocking && is_pinned(to.const_data_ptr()))) wait_for(clock_of(current));
  }
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  if (self.device().type() == KIND) use(self, false);
  if (to.device().type() == KIND) use(to, true);
  if (self.device().type() != to.device().type() && !inside) count_copy(self, to, non_blocking);
  bare(to).copy_(bare(self));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  Lock lock(mutex);
  use(self, false);
  wait_for(clock_of(current));
  return bare(self).item();
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

// Operations for whose result's size, or truth, the host waits.
const std::set<std::string> WAITING = {"aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2",
                                       "aten::unique_dim", "aten::unique_consecutive"};

// Every other operation. cpu_fallback would take tensors of both devices; a real device refuses them.
void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const auto& tensor = value.toTensor();
    TORCH_CHECK(tensor.device().type() == KIND || tensor.dim() == 0,
                "Expected all tensors to be on the same device, but ", op.schema().name(), " got one on ",
                tensor.device());
  }
  if (WAITING.count(op.schema().name())) {
    Lock lock(mutex);
    wait_for(clock_of(current));
  }
  const bool before = std::exchange(inside, true);
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    inside = before;
    throw;
  }
  inside = before;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  m.impl("record_stream", TORCH_FN(record_stream));
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
  m.def("counts", [] {
    Lock lock(mutex);
    return counts;
  });
  m.def("seed", [](uint64_t number) {
    at::Generator generator = at::globalContext().defaultGenerator(DEVICE);
    generator.set_current_seed(number);
  });
}
