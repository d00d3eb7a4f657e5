// Runs an exported plan, of one model or of several that queue, by LiteRT's C++ API and OpenVINO's C API.
//
//   run_plan FOLDER [RUNS]                     times the plan, and compares with the expected times
//   run_plan FOLDER RUNS INPUTS OUTPUTS        reads all inputs of all models from a file, in their order, as bytes;
//                                              writes the outputs' bytes to another one
//
// plan.txt in the folder is plan.json as text: a line for each processor, model, tensor, stage and client. Stages of
// one model run in the order of the plan, on one thread. With several models, each processor is a thread; jobs are
// scheduled as by scheduler.py beside the plan. Stages that take more than 1.2 times as long as expected are marked.
// The plan always runs: only the runner in Python can fall back to the whole model. Kernels of custom operators are in
// custom_ops.so beside the stage files, each a LiteRtCustomOpKernel litert_custom_op_NAME. OpenVINO is the library that
// the environment variable OPENVINO_C_LIBRARY names, else libopenvino_c.so beside this program or of the system.

#include <dlfcn.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "litert/c/internal/litert_accelerator_registration.h"
#include "litert/c/internal/litert_delegate_wrapper.h"
#include "litert/cc/litert_common.h"
#include "litert/cc/litert_compiled_model.h"
#include "litert/cc/litert_environment.h"
#include "litert/cc/litert_options.h"
#include "litert/cc/litert_tensor_buffer.h"

namespace {

constexpr double kSlower = 1.2;

constexpr std::uint32_t kXnnpackFloat16 = 0xF;  // compute in float16 whatever the model says
constexpr std::size_t kAlignment = 64;  // of a tensor's memory; kernels read a little beyond its end
constexpr std::int64_t kNever = std::int64_t{1} << 62;

using Bytes = std::vector<std::uint8_t>;
using Words = std::map<std::string, std::string>;  // "key=value" words of a line

template <typename T>
T Must(litert::Expected<T> found, const std::string& what) {
  if (!found) throw std::runtime_error(what + ": " + std::string(found.Error().Message()));
  if constexpr (std::is_reference_v<T>) {
    return *found;
  } else {
    return std::move(*found);
  }
}

void Must(litert::Expected<void> done, const std::string& what) {
  if (!done) throw std::runtime_error(what + ": " + std::string(done.Error().Message()));
}

// A processor's line in plan.txt.
struct ProcessorLine {
  std::string kind, precision, kernels, runtime, device;
  bool both = false;
  int threads = 1;
  std::vector<int> cores, excludes;
};

// A range of a file's bytes.
struct Part {
  std::string file;
  std::int64_t offset = 0, nbytes = 0;
};

// A stage file, and the numbers of the tensors that it reads and writes.
struct StageLine {
  std::string file;
  std::vector<int> inputs, outputs;
  double expected_ms = 0.0;
  bool interpreted = false;  // it has state, or outputs that are constant or whose size depends on data
  std::vector<std::pair<std::string, int>> custom;  // names and versions of its custom operators
  std::vector<Part> parts;  // where the file is not stored whole: the ranges that it is joined from
};

// A tensor, which may be a view: rows of another one (root).
struct TensorLine {
  std::size_t nbytes = 0, first = 0;
  int root = -1;
};

struct ModelLines {
  std::string folder;
  std::map<int, TensorLine> tensors;
  std::vector<int> inputs, outputs;
  std::vector<StageLine> stages;
};

// An instance of a model: when its requests arrive, and which processors may run its jobs.
struct ClientLine {
  std::string name;
  int model = 0, requests = 1, queue = 1;
  bool closed = false;
  std::int64_t priority = 0, deadline_ns = 0;
  std::vector<std::int64_t> releases_ns;
  std::vector<std::vector<int>> processors;  // for each job those that may run it
  std::vector<std::vector<int>> needs;  // for each job the jobs that it waits for
};

struct PlanText {
  std::string dispatch = "static";
  std::vector<ProcessorLine> processors;
  std::vector<ModelLines> models;
  std::vector<ClientLine> clients;
};

template <typename Number>
std::vector<Number> Numbers(const std::string& text) {
  std::vector<Number> found;
  std::stringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) found.push_back(static_cast<Number>(std::stoll(part)));
  return found;
}

Words ReadWords(std::istream& line) {
  Words words;
  for (std::string word; line >> word;) {
    const auto split = word.find('=');
    if (split == std::string::npos) throw std::runtime_error("plan.txt: " + word + " is no key=value");
    words[word.substr(0, split)] = word.substr(split + 1);
  }
  return words;
}

ProcessorLine ReadProcessor(const Words& words) {
  ProcessorLine processor;
  for (const auto& [key, value] : words) {
    if (key == "kind") processor.kind = value;
    else if (key == "precision") processor.precision = value;
    else if (key == "kernels") processor.kernels = value;
    else if (key == "device") processor.device = value;
    else if (key == "runtime" && value == "openvino") processor.runtime = value;
    else if (key == "both") processor.both = value == "1";
    else if (key == "threads") processor.threads = std::stoi(value);
    else if (key == "cores") processor.cores = Numbers<int>(value);
    else if (key == "excludes") processor.excludes = Numbers<int>(value);
    else throw std::runtime_error("a processor has " + key + "=" + value + ", which only run_plan.py can do");
  }
  return processor;
}

StageLine ReadStage(const Words& words) {
  StageLine stage{words.at("file"), Numbers<int>(words.at("inputs")), Numbers<int>(words.at("outputs")),
                  std::stod(words.at("expected_ms"))};
  stage.interpreted = words.count("engine") > 0;
  const auto each = [&](const char* key, auto add) {
    std::stringstream list(words.count(key) ? words.at(key) : "");
    for (std::string item; std::getline(list, item, ',');) add(item);
  };
  const auto last = [](std::string& item) {  // returns the number after the last colon, and removes both
    const auto split = item.rfind(':');
    if (split == std::string::npos) throw std::runtime_error("plan.txt: " + item + " lacks :NUMBER");
    const std::int64_t number = std::stoll(item.substr(split + 1));
    item.resize(split);
    return number;
  };
  each("custom", [&](std::string item) {
    const int version = static_cast<int>(last(item));
    stage.custom.emplace_back(item, version);
  });
  each("parts", [&](std::string item) {
    const std::int64_t nbytes = last(item), offset = last(item);
    stage.parts.push_back({item, offset, nbytes});
  });
  return stage;
}

ClientLine ReadClient(const Words& words) {
  ClientLine client;
  client.name = words.at("name");
  client.model = std::stoi(words.at("model"));
  client.requests = std::stoi(words.at("requests"));
  client.queue = std::stoi(words.at("queue"));
  client.closed = words.at("closed") == "1";
  client.priority = std::stoll(words.at("priority"));
  client.deadline_ns = std::stoll(words.at("deadline_ns"));
  client.releases_ns = Numbers<std::int64_t>(words.at("releases_ns"));
  std::stringstream jobs(words.at("processors")), needs(words.at("needs"));
  for (std::string job; std::getline(jobs, job, ';');) client.processors.push_back(Numbers<int>(job));
  for (std::string job; std::getline(needs, job, ';');) client.needs.push_back(Numbers<int>(job));
  client.needs.resize(client.processors.size());  // the text drops empty entries at the end
  return client;
}

PlanText ReadPlan(const std::string& folder) {
  std::ifstream file(folder + "/plan.txt");
  if (!file) throw std::runtime_error(folder + "/plan.txt cannot be read");
  PlanText plan;
  for (std::string line; std::getline(file, line);) {
    std::stringstream rest(line);
    std::string kind, text;
    rest >> kind;
    if (kind == "dispatch") {
      rest >> plan.dispatch;
    } else if (kind == "processor") {
      plan.processors.push_back(ReadProcessor(ReadWords(rest)));
    } else if (kind == "client") {
      plan.clients.push_back(ReadClient(ReadWords(rest)));
    } else if (kind == "model") {
      rest >> text;
      plan.models.emplace_back().folder = folder + "/" + text;
    } else if (kind == "tensor") {
      int number = 0;
      TensorLine tensor;
      rest >> number >> tensor.nbytes;
      if (rest >> text) {  // in=ROOT,FIRST BYTE
        const auto place = Numbers<std::int64_t>(text.substr(3));
        tensor.root = static_cast<int>(place.at(0));
        tensor.first = static_cast<std::size_t>(place.at(1));
      }
      plan.models.at(plan.models.size() - 1).tensors[number] = tensor;
    } else if (kind == "inputs" || kind == "outputs") {
      rest >> text;
      ModelLines& model = plan.models.at(plan.models.size() - 1);
      (kind == "inputs" ? model.inputs : model.outputs) = Numbers<int>(text);
    } else if (kind == "stage") {
      plan.models.at(plan.models.size() - 1).stages.push_back(ReadStage(ReadWords(rest)));
    }
  }
  return plan;
}

// The tensors of an instance; views share the memory of their root.
class Tensors {
 public:
  explicit Tensors(const ModelLines& model) : lines_(&model.tensors) {
    for (const auto& [number, line] : *lines_) {
      if (line.root < 0) data_[number].assign(line.nbytes, 0);
    }
    for (const auto& [number, line] : *lines_) {
      if (line.root >= 0 && line.first + line.nbytes > data_.at(line.root).size()) {
        throw std::runtime_error("plan.txt: a tensor lies outside the one that it is a part of");
      }
    }
  }

  litert::Span<std::uint8_t> At(int number) {
    const TensorLine& line = lines_->at(number);
    const int root = line.root < 0 ? number : line.root;
    Bytes& data = data_.at(root);
    CheckSize(root, data.size());
    return litert::Span<std::uint8_t>(data.data() + line.first, line.nbytes);
  }

  // Stores an output of a stage; its size may depend on data.
  void Set(int number, const void* data, std::size_t nbytes) {
    const auto first = static_cast<const std::uint8_t*>(data);
    if (lines_->at(number).root < 0) {
      data_.at(number).assign(first, first + nbytes);
    } else {
      CheckSize(number, nbytes);
      std::copy(first, first + nbytes, At(number).begin());
    }
  }

  // Returns a copy of a tensor of any size.
  Bytes Whole(int number) {
    if (lines_->at(number).root < 0) return data_.at(number);
    const auto data = At(number);
    return Bytes(data.begin(), data.end());
  }

 private:
  void CheckSize(int number, std::size_t nbytes) const {
    if (nbytes == lines_->at(number).nbytes) return;
    throw std::runtime_error("tensor " + std::to_string(number) + " has " + std::to_string(nbytes) +
                             " bytes where the plan has room for " + std::to_string(lines_->at(number).nbytes) +
                             ": its size depends on the inputs");
  }

  const std::map<int, TensorLine>* lines_;
  std::map<int, Bytes> data_;
};

void Pin(const std::vector<int>& cores) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int core : cores) CPU_SET(core, &set);
  if (!cores.empty()) sched_setaffinity(0, sizeof(set), &set);  // if it fails, the system chooses the cores
}

// The kernel of a custom operator, from the library beside the stage files.
const LiteRtCustomOpKernel& Kernel(const std::string& folder, std::string name) {
  void* library = dlopen((folder + "/custom_ops.so").c_str(), RTLD_NOW);
  if (library == nullptr) throw std::runtime_error("kernels of custom operators: " + std::string(dlerror()));
  for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
  const void* kernel = dlsym(library, ("litert_custom_op_" + name).c_str());
  if (kernel == nullptr) throw std::runtime_error("custom_ops.so has no litert_custom_op_" + name);
  return *static_cast<const LiteRtCustomOpKernel*>(kernel);
}

// A stage file on disk; a joined one is deleted with this object.
class StageFile {
 public:
  StageFile(const std::string& folder, const StageLine& line) : path(folder + "/" + line.file) {
    if (line.parts.empty()) return;
    path = joined_ = std::filesystem::temp_directory_path() / "stage_XXXXXX.tflite";
    const int made = mkstemps(joined_.data(), 7);
    if (made < 0) throw std::runtime_error(path + " cannot be made: " + std::strerror(errno));
    close(made);
    path = joined_;
    try {
      std::ofstream out(joined_, std::ios::binary);
      for (const auto& [file, offset, nbytes] : line.parts) Append(out, folder + "/" + file, offset, nbytes);
      if (!out.flush()) throw std::runtime_error(joined_ + " cannot be written");
    } catch (...) {
      unlink(joined_.c_str());
      throw;
    }
  }
  ~StageFile() {
    if (!joined_.empty()) unlink(joined_.c_str());
  }
  StageFile(const StageFile&) = delete;

  std::string path;

 private:
  static void Append(std::ofstream& out, const std::string& file, std::int64_t offset, std::int64_t nbytes) {
    std::ifstream in(file, std::ios::binary | std::ios::ate);
    if (!in) throw std::runtime_error(file + " cannot be read");
    const std::int64_t size = in.tellg();
    if (offset < 0 || nbytes < 0 || offset > size || nbytes > size - offset) {
      throw std::runtime_error(file + " has " + std::to_string(size) + " bytes, fewer than the plan reads of it");
    }
    in.seekg(offset);
    std::vector<char> block(1 << 20);
    for (std::int64_t count; nbytes > 0; nbytes -= count) {
      count = std::min<std::int64_t>(nbytes, block.size());
      if (!in.read(block.data(), count)) throw std::runtime_error(file + " cannot be read");
      out.write(block.data(), count);
    }
  }

  std::string joined_;
};

// A stage on its processor.
class Stage {
 public:
  Stage(const StageLine& line, const ProcessorLine& processor) : line_(&line), processor_(&processor) {}
  virtual ~Stage() = default;

  const StageLine& line() const { return *line_; }
  const ProcessorLine& processor() const { return *processor_; }

  // Runs the stage on an instance's tensors, and returns its time in milliseconds.
  double Run(Tensors& tensors) {
    const auto begin = std::chrono::steady_clock::now();
    Execute(tensors);
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  }

 protected:
  virtual void Execute(Tensors& tensors) = 0;

  void CheckPorts(std::size_t inputs, std::size_t outputs) const {
    if (inputs != line_->inputs.size() || outputs != line_->outputs.size()) {
      throw std::runtime_error(line_->file + " has other inputs or outputs than the plan says");
    }
  }

 private:
  const StageLine* line_;
  const ProcessorLine* processor_;
};

// Tables of a FlatBuffer, with fields identified by number.
struct FlatBuffer {
  template <typename T>
  T& At(std::size_t position) const {
    if (position > bytes.size() || sizeof(T) > bytes.size() - position) {
      throw std::runtime_error("a stage file is damaged");
    }
    return *reinterpret_cast<T*>(bytes.data() + position);
  }

  std::size_t Follow(std::size_t position) const { return position + At<std::uint32_t>(position); }

  // Returns the position of a field of a table, 0 where it is absent.
  std::size_t Field(std::size_t table, std::size_t number) const {
    const std::size_t fields = table - At<std::int32_t>(table), entry = 4 + 2 * number;
    const std::size_t offset = entry < At<std::uint16_t>(fields) ? At<std::uint16_t>(fields + entry) : 0;
    return offset == 0 ? 0 : table + offset;
  }

  // Returns the tables in a field that is a list of tables.
  std::vector<std::size_t> Items(std::size_t table, std::size_t number) const {
    std::vector<std::size_t> found;
    const std::size_t list = Field(table, number) == 0 ? 0 : Follow(Field(table, number));
    for (std::size_t i = 1; list != 0 && i <= At<std::uint32_t>(list); ++i) found.push_back(Follow(list + 4 * i));
    return found;
  }

  Bytes& bytes;
};

// A stage file compiled by LiteRT; its kernels' threads are created on the processor's cores.
class LitertStage : public Stage {
 public:
  LitertStage(litert::Environment& environment, const std::string& folder, const StageLine& line,
              const ProcessorLine& processor)
      : Stage(line, processor) {
    auto options = Must(litert::Options::Create(), "options");
    const auto accelerator = processor.kind == "gpu"   ? litert::HwAccelerators::kGpu
                             : processor.kind == "npu" ? litert::HwAccelerators::kNpu
                                                       : litert::HwAccelerators::kCpu;
    if (processor.both) {  // LiteRT places operators that the accelerator does not support on the CPU
      Must(options.SetHardwareAccelerators(accelerator | litert::HwAccelerators::kCpu), "accelerators");
    } else {
      Must(options.SetHardwareAccelerators(accelerator), "accelerator");
    }
    if (processor.kind == "cpu") {
      auto& cpu = Must(options.GetCpuOptions(), "options of the CPU");
      Must(cpu.SetNumThreads(processor.threads), "threads");
      if (processor.kernels == "builtin") {
        Must(cpu.SetKernelMode(kLiteRtCpuKernelModeBuiltin), "kernels");
      } else if (processor.kernels == "reference") {
        Must(cpu.SetKernelMode(kLiteRtCpuKernelModeReference), "kernels");
      } else if (processor.kernels == "f16") {
        // For interpreted stages, as in run_plan.py, float32 is used.
        if (!line.interpreted) Must(cpu.SetXNNPackFlags(kXnnpackFloat16), "kernels");
      } else if (!processor.kernels.empty() && processor.kernels != "xnnpack") {
        throw std::runtime_error("kernels " + processor.kernels + " are not known");
      }
    } else if (processor.kind == "gpu" && processor.precision == "f32") {
      Must(Must(options.GetGpuOptions(), "options of the GPU").SetPrecision(litert::GpuOptions::Precision::kFp32),
           "precision");
    }
    for (const auto& [name, version] : line.custom) {
      Must(options.AddCustomOpKernel(name, version, Kernel(folder, name)), "kernel of " + name);
    }
    const StageFile file(folder, line);
    loading = line.interpreted ? this : nullptr;
    if (line.interpreted) {
      HideState(file.path);
      const litert::BufferRef<std::uint8_t> bytes(bytes_.data(), bytes_.size());
      model_.emplace(Must(litert::CompiledModel::Create(environment, bytes, options), line.file));
    } else {
      model_.emplace(Must(litert::CompiledModel::Create(environment, file.path, options), line.file));
    }
    into_ = Must(model_->CreateInputBuffers(), line.file);
    out_ = Must(model_->CreateOutputBuffers(), line.file);
    CheckPorts(into_.size(), out_.size());
    if (!line.interpreted) return;
    CheckPorts(into_.size(), context_ == nullptr ? 0 : outputs_.size());
    Must(model_->GetOutputTensorLayouts(0, true), line.file);  // kernels mark here which outputs they allocate
    model_->SetCancellationFunction(this, &LitertStage::Begin);
  }

  // Registers a delegate that takes no operator; LiteRT passes it the tensors of an interpreted stage.
  static void ShowTensors(litert::Environment& environment) {
    LiteRtAccelerator shown = nullptr;
    LiteRtCreateAccelerator(&shown);
    LiteRtSetAcceleratorGetName(shown, [](LiteRtAcceleratorConst, const char** name) {
      *name = "tensors";
      return kLiteRtStatusOk;
    });
    LiteRtSetAcceleratorGetVersion(shown, [](LiteRtAcceleratorConst, LiteRtApiVersion* version) {
      *version = {1, 0, 0};
      return kLiteRtStatusOk;
    });
    LiteRtSetAcceleratorGetHardwareSupport(shown, [](LiteRtAcceleratorConst, LiteRtHwAcceleratorSet* supported) {
      *supported = kLiteRtHwAcceleratorCpu;
      return kLiteRtStatusOk;
    });
    LiteRtSetDelegateFunction(shown, [](LiteRtRuntimeContext*, LiteRtEnvironment, LiteRtAcceleratorConst, LiteRtOptions,
                                        LiteRtDelegateWrapper* made) {
      static TfLiteDelegate delegate{.Prepare = [](TfLiteContext* context, TfLiteDelegate*) {
                                       loading->Show(context);
                                       return kTfLiteOk;
                                     },
                                     .flags = kTfLiteDelegateFlagsAllowDynamicTensors};
      if (loading == nullptr) return kLiteRtStatusOk;
      return LiteRtWrapDelegate(reinterpret_cast<TfLiteOpaqueDelegate*>(&delegate), [](TfLiteOpaqueDelegate*) {}, made);
    });
    if (LiteRtRegisterAccelerator(environment.Get(), shown, nullptr, [](void*) {}) != kLiteRtStatusOk) {
      throw std::runtime_error("LiteRT refused the delegate");
    }
  }

 private:
  // An output of an interpreted stage among LiteRT's tensors, with its allocation when the run began.
  struct Output {
    bool OfKernel() const { return type == kTfLiteDynamic || type == kTfLitePersistentRo; }

    std::uint32_t index = 0;
    TfLiteAllocationType type = kTfLiteMemNone;
    void* data = nullptr;
    std::size_t nbytes = 0;
  };

  // Records outputs and state of a stage's main subgraph, and the tensors with scales between an LSTM's gates. LiteRT
  // does not load a model with state or such tensors, so they are removed from the bytes here, and restored in tensors
  // and operators by Show().
  void HideState(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    bytes_.assign(std::istreambuf_iterator<char>(in), {});
    const FlatBuffer file{bytes_};
    const auto subgraph = file.Items(file.Follow(0), 2).at(0);
    const auto tensors = file.Items(subgraph, 0);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (const auto flag = file.Field(tensors[i], 5); flag != 0 && file.At<std::uint8_t>(flag) != 0) {
        state_.push_back(i);
        file.At<std::uint8_t>(flag) = 0;
      }
    }
    const auto nodes = file.Items(subgraph, 3);
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      if (const auto changed = file.Field(nodes[i], 7); changed != 0) file.At<std::uint32_t>(file.Follow(changed)) = 0;
      const auto scales = file.Field(nodes[i], 8) == 0 ? 0 : file.Follow(file.Field(nodes[i], 8));
      if (scales == 0) continue;
      for (std::uint32_t k = 0; k < file.At<std::uint32_t>(scales); ++k) {
        scales_[i].push_back(file.At<std::int32_t>(scales + 4 + 4 * k));
      }
      file.At<std::uint32_t>(scales) = 0;
    }
    const auto outputs = file.Follow(file.Field(subgraph, 2));
    for (std::uint32_t i = 0; i < file.At<std::uint32_t>(outputs); ++i) {
      outputs_.push_back({file.At<std::uint32_t>(outputs + 4 + 4 * i)});
    }
  }

  void Show(TfLiteContext* context) {
    if (context_ != nullptr) return;  // the first call is for the main subgraph
    context_ = context;
    for (const std::size_t i : state_) {
      TfLiteTensor& tensor = context->tensors[i];
      const std::size_t nbytes = (tensor.bytes + 2 * kAlignment - 1) / kAlignment * kAlignment;
      tensor.data.data = std::aligned_alloc(kAlignment, nbytes);  // never freed: stages live until the program ends
      std::memset(tensor.data.data, tensor.type == kTfLiteInt8 ? tensor.params.zero_point : 0, nbytes);
      tensor.allocation_type = kTfLiteCustom;
      tensor.is_variable = true;
    }
    for (const auto& [index, tensors] : scales_) {
      TfLiteNode* node = nullptr;
      TfLiteRegistration* kernel = nullptr;
      if (context->GetNodeAndRegistration(context, index, &node, &kernel) != kTfLiteOk) continue;
      const std::size_t nbytes = sizeof(TfLiteIntArray) + tensors.size() * sizeof(int);
      node->intermediates = static_cast<TfLiteIntArray*>(std::malloc(nbytes));  // freed with the node
      node->intermediates->size = tensors.size();
      std::copy(tensors.begin(), tensors.end(), node->intermediates->data);
    }
  }

  void Execute(Tensors& tensors) override {
    for (std::size_t i = 0; i < into_.size(); ++i) {
      Must(into_[i].Write<std::uint8_t>(tensors.At(line().inputs[i])), "input of " + line().file);
    }
    // A compiled model gives each output a buffer, and refuses to run where a kernel owns the memory. So such an output
    // is declared an ordinary one until the first operator is about to run.
    for (Output& output : outputs_) {
      TfLiteTensor& tensor = context_->tensors[output.index];
      output.type = tensor.allocation_type;
      output.data = tensor.data.data;
      output.nbytes = tensor.bytes;
      if (!output.OfKernel()) continue;
      tensor.allocation_type = kTfLiteArenaRw;
      tensor.bytes = 0;  // it may have been larger than LiteRT's buffer
    }
    begun_ = false;
    Must(model_->Run(into_, out_), line().file);
    for (std::size_t i = 0; i < out_.size(); ++i) {
      if (line().interpreted) {
        const TfLiteTensor& tensor = context_->tensors[outputs_[i].index];
        tensors.Set(line().outputs[i], tensor.data.data, tensor.bytes);
      } else {
        Must(out_[i].Read<std::uint8_t>(tensors.At(line().outputs[i])), "output of " + line().file);
      }
    }
  }

  // Called before each operator.
  static bool Begin(void* self) {
    auto& stage = *static_cast<LitertStage*>(self);
    for (const Output& output : stage.outputs_) {
      if (stage.begun_ || !output.OfKernel()) continue;
      TfLiteTensor& tensor = stage.context_->tensors[output.index];
      tensor.allocation_type = output.type;
      tensor.data.data = output.data;
      tensor.bytes = output.nbytes;
    }
    stage.begun_ = true;
    return false;
  }

  static inline thread_local LitertStage* loading = nullptr;

  std::optional<litert::CompiledModel> model_;
  std::vector<litert::TensorBuffer> into_, out_;
  // For interpreted stages:
  Bytes bytes_;
  TfLiteContext* context_ = nullptr;
  std::vector<std::size_t> state_;  // numbers of tensors
  std::map<int, std::vector<int>> scales_;  // operator (an integer LSTM) -> the tensors whose scales it reads
  std::vector<Output> outputs_;
  bool begun_ = false;
};

// OpenVINO's C API, declared here because the Python package contains the library without headers.
struct OpenVino {
  template <typename Function>
  Function* Find(const char* name) const {
    void* found = dlsym(library, name);
    if (found == nullptr) throw std::runtime_error(std::string("OpenVINO's library has no ") + name);
    return reinterpret_cast<Function*>(found);
  }

  void Must(int status, const std::string& what) const {
    if (status == 0) return;
    std::string why = last_error();
    std::replace(why.begin(), why.end(), '\n', ' ');
    throw std::runtime_error(what + ": " + why);
  }

  using Create = int(void** made);
  using CreateOf = int(const void* from, void** made);
  using Count = int(const void* of, std::size_t* count);
  using Port = int(const void* request, std::size_t index, void** tensor);

  void* library = [] {
    const char* path = std::getenv("OPENVINO_C_LIBRARY");
    void* found = dlopen(path != nullptr ? path : "libopenvino_c.so", RTLD_NOW);
    if (found == nullptr) throw std::runtime_error("OpenVINO: set OPENVINO_C_LIBRARY: " + std::string(dlerror()));
    return found;
  }();
  const char* (*last_error)() = Find<const char*()>("ov_get_last_err_msg");
  Create* create = Find<Create>("ov_core_create");
  int (*compile)(const void*, const char* path, const char* device, std::size_t words, void** compiled, ...) =
      Find<int(const void*, const char*, const char*, std::size_t, void**, ...)>("ov_core_compile_model_from_file");
  CreateOf* request = Find<CreateOf>("ov_compiled_model_create_infer_request");
  Count* inputs = Find<Count>("ov_compiled_model_inputs_size");
  Count* outputs = Find<Count>("ov_compiled_model_outputs_size");
  int (*infer)(void* request) = Find<int(void*)>("ov_infer_request_infer");
  Port* input = Find<Port>("ov_infer_request_get_input_tensor_by_index");
  Port* output = Find<Port>("ov_infer_request_get_output_tensor_by_index");
  CreateOf* data = Find<CreateOf>("ov_tensor_data");
  Count* nbytes = Find<Count>("ov_tensor_get_byte_size");
  void (*free_tensor)(void* tensor) = Find<void(void*)>("ov_tensor_free");
};

// A stage file compiled by OpenVINO, with the same properties as in run_plan.py.
class OpenVinoStage : public Stage {
 public:
  OpenVinoStage(const std::string& folder, const StageLine& line, const ProcessorLine& processor)
      : Stage(line, processor) {
    if (processor.kernels == "blocked") {  // the C API writes no model with its kernels
      throw std::runtime_error("only run_plan.py runs OpenVINO's blocked kernels");
    }
    const bool cpu = processor.kind == "cpu";
    const std::string threads = std::to_string(processor.threads);
    std::vector<const char*> words{"PERFORMANCE_HINT", "LATENCY"};
    if (processor.kind != "npu") {
      const char* mode = processor.precision == "f32" ? "ACCURACY" : "PERFORMANCE";
      words.insert(words.end(), {"NUM_STREAMS", "1", "INFERENCE_PRECISION_HINT", processor.precision.c_str(),
                                 "EXECUTION_MODE_HINT", mode});
    }
    if (cpu) words.insert(words.end(), {"INFERENCE_NUM_THREADS", threads.c_str(), "ENABLE_HYPER_THREADING", "YES"});
    const std::size_t count = words.size();
    words.resize(12);
    std::string device = cpu ? "CPU" : processor.device;
    if (processor.both) device = "HETERO:" + device + ",CPU";
    const StageFile file(folder, line);
    void* core = nullptr;
    void* compiled = nullptr;
    api_.Must(api_.create(&core), "OpenVINO");
    api_.Must(api_.compile(core, file.path.c_str(), device.c_str(), count, &compiled, words[0], words[1], words[2],
                           words[3], words[4], words[5], words[6], words[7], words[8], words[9], words[10], words[11]),
              line.file);
    api_.Must(api_.request(compiled, &request_), line.file);
    std::size_t inputs = 0, outputs = 0;
    api_.Must(api_.inputs(compiled, &inputs), line.file);
    api_.Must(api_.outputs(compiled, &outputs), line.file);
    CheckPorts(inputs, outputs);
  }

 private:
  void Execute(Tensors& tensors) override {
    for (std::size_t i = 0; i < line().inputs.size(); ++i) {
      const auto given = tensors.At(line().inputs[i]);
      const auto room = At(api_.input, i);
      if (room.size() != given.size()) throw std::runtime_error(line().file + " has an input of another size");
      std::copy(given.begin(), given.end(), room.begin());
    }
    api_.Must(api_.infer(request_), line().file);
    for (std::size_t i = 0; i < line().outputs.size(); ++i) {
      const auto found = At(api_.output, i);
      tensors.Set(line().outputs[i], found.data(), found.size());
    }
  }

  litert::Span<std::uint8_t> At(OpenVino::Port* port, std::size_t i) const {
    void *tensor = nullptr, *data = nullptr;
    std::size_t nbytes = 0;
    api_.Must(port(request_, i, &tensor), line().file);
    const int status = api_.data(tensor, &data) | api_.nbytes(tensor, &nbytes);
    api_.free_tensor(tensor);  // the request keeps the memory
    api_.Must(status, line().file);
    return litert::Span<std::uint8_t>(static_cast<std::uint8_t*>(data), nbytes);
  }

  OpenVino api_;
  void* request_ = nullptr;
};

// Compiles a stage for its processor, with its kernels' threads on the processor's cores.
std::unique_ptr<Stage> MakeStage(litert::Environment& environment, const std::string& folder, const StageLine& line,
                                 const ProcessorLine& processor) {
  Pin(processor.cores);
  if (processor.runtime == "openvino") return std::make_unique<OpenVinoStage>(folder, line, processor);
  return std::make_unique<LitertStage>(environment, folder, line, processor);
}

std::int64_t Now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// The job scheduler, with the same rules as scheduler.py.
class Scheduler {
 public:
  enum Status { kIdle, kBusy, kOver };
  enum State { kWaits, kQueued, kRuns, kDone };

  struct Job {
    State state = kWaits;
    std::int64_t ready_ns = 0;
  };

  struct Client {
    Status status = kIdle;
    int request = 0, come = 0, left = 0;
    std::vector<Job> jobs;
    std::vector<std::int64_t> came_ns, ended_ns;  // of each request; -1 where it was rejected, 0 before it ended
  };

  struct Start {
    int client = -1, job = -1, processor = -1;
  };

  explicit Scheduler(const PlanText& plan) : plan_(plan), busy_(plan.processors.size()) {}

  void Begin(std::int64_t now_ns) {
    begin_ns_ = now_ns;
    clients_.clear();
    for (const ClientLine& line : plan_.clients) {
      Client client;
      client.jobs.resize(line.processors.size());
      client.came_ns.assign(line.requests, 0);
      client.ended_ns.assign(line.requests, 0);
      clients_.push_back(std::move(client));
    }
  }

  const Client& client(int k) const { return clients_[k]; }

  bool Over() const {
    return std::all_of(clients_.begin(), clients_.end(), [](const Client& client) { return client.status == kOver; });
  }

  std::int64_t NextArrival() const {
    std::int64_t found = kNever;
    for (std::size_t k = 0; k < clients_.size(); ++k) {
      const auto& releases = plan_.clients[k].releases_ns;
      if (clients_[k].status != kOver && clients_[k].come < static_cast<int>(releases.size())) {
        found = std::min(found, begin_ns_ + releases[clients_[k].come]);
      }
    }
    return found;
  }

  // Admits requests that have arrived, and assigns jobs to free processors.
  std::vector<Start> Step(std::int64_t now_ns) {
    std::vector<std::pair<std::tuple<std::int64_t, std::int64_t>, std::pair<int, int>>> queue;
    for (int k = 0; k < static_cast<int>(clients_.size()); ++k) {
      Arrive(k, now_ns);
      for (int job = 0; job < static_cast<int>(clients_[k].jobs.size()); ++job) {
        if (clients_[k].jobs[job].state == kQueued) queue.push_back({Key(k, job), {k, job}});
      }
    }
    std::sort(queue.begin(), queue.end());
    std::vector<bool> taken = busy_;
    std::vector<Start> found;
    for (const auto& [key, who] : queue) {
      const auto [k, job] = who;
      const auto& processors = plan_.clients[k].processors[job];
      const auto free = std::find_if(processors.begin(), processors.end(), [&](int processor) {
        const auto& excludes = plan_.processors[processor].excludes;
        return std::none_of(excludes.begin(), excludes.end(), [&](int other) { return taken[other]; });
      });
      if (free == processors.end()) {
        for (const int processor : processors) taken[processor] = true;  // no later job may take them
        continue;
      }
      taken[*free] = busy_[*free] = true;
      clients_[k].jobs[job].state = kRuns;
      found.push_back({k, job, *free});
    }
    return found;
  }

  void Finish(const Start& ran, std::int64_t now_ns) {
    Client& client = clients_[ran.client];
    const ClientLine& line = plan_.clients[ran.client];
    busy_[ran.processor] = false;
    client.jobs[ran.job].state = kDone;
    if (--client.left > 0) {
      for (std::size_t job = 0; job < line.needs.size(); ++job) {
        const auto& needs = line.needs[job];
        const bool over = std::all_of(needs.begin(), needs.end(), [&](int i) { return client.jobs[i].state == kDone; });
        if (client.jobs[job].state == kWaits && over) client.jobs[job] = {kQueued, now_ns};
      }
      return;
    }
    client.ended_ns[client.request] = now_ns;
    int number = client.request + 1;
    if (line.closed && number < line.requests) {
      client.came_ns[number] = now_ns;
      WorkOn(client, line, number, now_ns);
      return;
    }
    while (number < client.come && client.ended_ns[number] == -1) ++number;
    if (number >= line.requests) {
      client.status = kOver;
    } else if (number < client.come) {
      WorkOn(client, line, number, now_ns);
    } else {
      client.status = kIdle;
      client.request = number;
    }
  }

 private:
  // Starts a request: jobs that wait for no other are ready.
  static void WorkOn(Client& client, const ClientLine& line, int number, std::int64_t now_ns) {
    client.status = kBusy;
    client.request = number;
    client.left = static_cast<int>(client.jobs.size());
    for (std::size_t job = 0; job < client.jobs.size(); ++job) {
      client.jobs[job] = {line.needs[job].empty() ? kQueued : kWaits, now_ns};
    }
  }

  void Arrive(int k, std::int64_t now_ns) {
    Client& client = clients_[k];
    const ClientLine& line = plan_.clients[k];
    while (client.status != kOver && client.come < static_cast<int>(line.releases_ns.size())) {
      const int number = client.come;
      const std::int64_t came_ns = begin_ns_ + line.releases_ns[number];
      if (came_ns > now_ns) break;
      ++client.come;
      client.came_ns[number] = came_ns;
      if (client.status == kIdle) {
        WorkOn(client, line, number, came_ns);
      } else if (Waiting(client) > line.queue) {
        client.ended_ns[number] = -1;
      }
    }
  }

  static int Waiting(const Client& client) {
    int found = 0;
    for (int number = client.request + 1; number < client.come; ++number) found += client.ended_ns[number] == 0;
    return found;
  }

  std::tuple<std::int64_t, std::int64_t> Key(int k, int job) const {
    const Client& client = clients_[k];
    const ClientLine& line = plan_.clients[k];
    const std::int64_t came_ns = client.came_ns[client.request];
    if (plan_.dispatch == "priority") return {-line.priority, came_ns};
    if (plan_.dispatch == "edf") return {line.deadline_ns ? came_ns + line.deadline_ns : kNever, came_ns};
    return {client.jobs[job].ready_ns, 0};
  }

  const PlanText& plan_;
  std::int64_t begin_ns_ = 0;
  std::vector<Client> clients_;
  std::vector<bool> busy_;  // of each processor
};

// Several models on their processors, each processor a thread.
class Models {
 public:
  Models(litert::Environment& environment, const PlanText& plan, std::vector<Tensors>& tensors)
      : plan_(plan), tensors_(tensors), scheduler_(plan), todo_(plan.processors.size()), made_(plan.processors.size()) {
    scheduler_.Begin(Now());
    for (std::size_t processor = 0; processor < plan.processors.size(); ++processor) {
      std::string problem;  // one after another: each creates its kernels' threads on its own cores
      std::thread([&] { problem = Load(environment, static_cast<int>(processor)); }).join();
      if (!problem.empty()) throw std::runtime_error(problem);
    }
    for (std::size_t processor = 0; processor < plan.processors.size(); ++processor) {
      threads_.emplace_back([this, processor] { Serve(static_cast<int>(processor)); });
    }
  }

  ~Models() {
    {
      const std::lock_guard<std::mutex> held(lock_);
      ended_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  // Runs all requests once, and appends their latencies in milliseconds to those of the instances.
  void Run(std::vector<std::vector<double>>& took) {
    std::unique_lock<std::mutex> held(lock_);
    scheduler_.Begin(Now());
    while (true) {
      Step();
      if (!problem_.empty()) throw std::runtime_error(problem_);
      if (scheduler_.Over()) break;
      const std::int64_t wait_ns = std::min<std::int64_t>(scheduler_.NextArrival() - Now(), 1'000'000'000);
      changed_.wait_for(held, std::chrono::nanoseconds(std::max<std::int64_t>(wait_ns, 0)));
    }
    for (std::size_t k = 0; k < plan_.clients.size(); ++k) {
      const Scheduler::Client& client = scheduler_.client(static_cast<int>(k));
      for (std::size_t i = 0; i < client.ended_ns.size(); ++i) {
        const std::int64_t ns = client.ended_ns[i] - client.came_ns[i];
        if (client.ended_ns[i] > 0) took[k].push_back(static_cast<double>(ns) * 1e-6);
      }
    }
  }

 private:
  std::string Load(litert::Environment& environment, int processor) {
    try {
      for (const ClientLine& client : plan_.clients) {
        const ModelLines& model = plan_.models.at(client.model);
        for (std::size_t job = 0; job < client.processors.size(); ++job) {
          const auto& takes = client.processors[job];
          const bool mine = std::find(takes.begin(), takes.end(), processor) != takes.end();
          auto& place = made_[processor][{client.model, static_cast<int>(job)}];
          if (mine && !place) {
            place = MakeStage(environment, model.folder, model.stages.at(job), plan_.processors[processor]);
          }
        }
      }
    } catch (const std::exception& error) {
      return error.what();
    }
    return "";
  }

  void Step() {
    for (const Scheduler::Start& start : scheduler_.Step(Now())) todo_[start.processor] = start;
    changed_.notify_all();
  }

  void Serve(int processor) {
    Pin(plan_.processors[processor].cores);
    std::unique_lock<std::mutex> held(lock_);
    while (true) {
      changed_.wait(held, [&] { return ended_ || todo_[processor].client >= 0; });
      if (ended_) return;
      const Scheduler::Start start = std::exchange(todo_[processor], Scheduler::Start{});
      const int k = start.client;
      held.unlock();
      std::string problem;
      try {
        made_[processor].at({plan_.clients[k].model, start.job})->Run(tensors_[k]);
      } catch (const std::exception& error) {
        problem = plan_.clients[k].name + ": " + error.what();
      }
      held.lock();
      if (!problem.empty()) {
        problem_ = problem;
        changed_.notify_all();
        continue;
      }
      scheduler_.Finish(start, Now());
      Step();
    }
  }

  const PlanText& plan_;
  std::vector<Tensors>& tensors_;
  Scheduler scheduler_;
  std::vector<Scheduler::Start> todo_;
  std::vector<std::map<std::pair<int, int>, std::unique_ptr<Stage>>> made_;
  std::vector<std::thread> threads_;
  std::mutex lock_;
  std::condition_variable changed_;
  std::string problem_;
  bool ended_ = false;
};

double Median(std::vector<double> values) {
  if (values.empty()) return 0.0;
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// Fills the inputs of instances, one after another, from a file.
void ReadInputs(const std::string& path, std::ifstream file, const PlanText& plan, std::vector<Tensors>& tensors,
                std::size_t first, std::size_t last) {
  for (std::size_t k = first; k < last; ++k) {
    for (const int number : plan.models.at(plan.clients[k].model).inputs) {
      const auto data = tensors[k].At(number);
      file.read(reinterpret_cast<char*>(data.data()), static_cast<std::streamsize>(data.size()));
    }
  }
  if (!file || file.peek() != std::ifstream::traits_type::eof()) {
    throw std::runtime_error(path + " does not hold as many bytes as the inputs");
  }
}

// Fills the inputs of each instance from its model's inputs.bin; they stay zero where there is no such file.
void ReadUsualInputs(const PlanText& plan, std::vector<Tensors>& tensors) {
  for (std::size_t k = 0; k < tensors.size(); ++k) {
    const std::string path = plan.models.at(plan.clients[k].model).folder + "/inputs.bin";
    if (std::ifstream file(path, std::ios::binary); file) ReadInputs(path, std::move(file), plan, tensors, k, k + 1);
  }
}

void WriteOutputs(const std::string& path, const PlanText& plan, std::vector<Tensors>& tensors) {
  std::ofstream file(path, std::ios::binary);
  for (std::size_t k = 0; k < tensors.size(); ++k) {
    for (const int number : plan.models.at(plan.clients[k].model).outputs) {
      const Bytes data = tensors[k].Whole(number);
      file.write(reinterpret_cast<const char*>(data.data()), static_cast<std::streamsize>(data.size()));
    }
  }
  if (!file.flush()) throw std::runtime_error(path + " cannot be written");
}

// Times the stages of one model in the order of the plan.
void RunOne(litert::Environment& environment, const PlanText& plan, Tensors& tensors, int runs, bool warm) {
  const ModelLines& model = plan.models.at(0);
  std::vector<std::unique_ptr<Stage>> stages;
  for (std::size_t i = 0; i < model.stages.size(); ++i) {
    const ProcessorLine& processor = plan.processors.at(plan.clients.at(0).processors.at(i).at(0));
    stages.push_back(MakeStage(environment, model.folder, model.stages[i], processor));
  }
  std::vector<std::vector<double>> took(stages.size());
  std::vector<double> totals;
  for (int run = warm ? -3 : 0; run < runs; ++run) {
    double total = 0.0;
    for (std::size_t i = 0; i < stages.size(); ++i) {
      Pin(stages[i]->processor().cores);
      const double ms = stages[i]->Run(tensors);
      total += ms;
      if (run >= 0) took[i].push_back(ms);
    }
    if (run >= 0) totals.push_back(total);
  }
  std::cout << Median(totals) << " ms an inference\n";
  for (std::size_t i = 0; i < stages.size(); ++i) {
    const double ms = Median(took[i]), expected = stages[i]->line().expected_ms;
    std::cout << "stage " << i << " " << stages[i]->processor().kind << ": " << ms << " ms";
    if (expected > 0.0) std::cout << ", " << ms / expected << " times as long as expected";
    if (expected > 0.0 && ms > kSlower * expected) std::cout << ": more than " << kSlower << " times (without priority)";
    std::cout << "\n";
  }
}

// Times the requests of several models.
void RunSeveral(litert::Environment& environment, const PlanText& plan, std::vector<Tensors>& tensors, int runs,
                bool warm) {
  std::vector<std::vector<double>> took(plan.clients.size()), first(plan.clients.size());
  Models models(environment, plan, tensors);
  if (warm) models.Run(first);
  for (int run = 0; run < runs; ++run) models.Run(took);
  for (std::size_t k = 0; k < took.size(); ++k) {
    std::cout << plan.clients[k].name << ": " << Median(took[k]) << " ms a request\n";
  }
}

int Run(const std::string& folder, int runs, const std::string& inputs, const std::string& outputs) {
  const PlanText plan = ReadPlan(folder);
  auto environment = Must(litert::Environment::Create({}), "LiteRT");
  LitertStage::ShowTensors(environment);
  std::vector<Tensors> tensors;
  for (const ClientLine& client : plan.clients) tensors.emplace_back(plan.models.at(client.model));
  if (inputs.empty()) {
    ReadUsualInputs(plan, tensors);
  } else {
    ReadInputs(inputs, std::ifstream(inputs, std::ios::binary), plan, tensors, 0, tensors.size());
  }
  const bool warm = outputs.empty();  // no warm-up for outputs: with state they depend on the number of runs
  if (plan.dispatch == "static") {
    RunOne(environment, plan, tensors.at(0), runs, warm);
  } else {
    RunSeveral(environment, plan, tensors, runs, warm);
  }
  if (!outputs.empty()) WriteOutputs(outputs, plan, tensors);
  return 0;
}

}  // namespace

int main(int count, char** words) {
  if (count != 2 && count != 3 && count != 5) {
    std::cerr << "usage: run_plan FOLDER [RUNS [INPUTS OUTPUTS]]\n";
    return 2;
  }
  int runs = 50;
  if (count > 2) {
    const char* end = words[2] + std::strlen(words[2]);
    const auto [rest, failure] = std::from_chars(words[2], end, runs);
    if (failure != std::errc() || rest != end || runs < 1) {
      std::cerr << "run_plan: " << words[2] << ": the number of runs is a whole number, at least 1\n";
      return 2;
    }
  }
  try {
    return Run(words[1], runs, count == 5 ? words[3] : "", count == 5 ? words[4] : "");
  } catch (const std::exception& error) {
    std::cerr << "run_plan: " << error.what() << "\n";
    return 1;
  }
}
