// Runs an exported plan with LiteRT's C++ API, of one model or of several that queue for the processors.
//
//   run_plan FOLDER [RUNS]                     times the plan, and compares with what it expects
//   run_plan FOLDER RUNS INPUTS OUTPUTS        on the bytes of all inputs in a file, one after another, of all models in
//                                              their order; the outputs' bytes go to another one
//
// plan.txt in the folder is plan.json in words: a line for each processor, model, tensor, stage and client. The stages of
// one model run in the order of the plan, on one thread. Of several models, each processor is a thread; jobs are scheduled
// as by scheduler.py beside the plan. A stage that takes more than 1.2 times as long as expected has
// drifted. The plan always runs: only the runner in Python can fall back to the whole model. Kernels of custom operators
// are in custom_ops.so beside the stage files, each a LiteRtCustomOpKernel litert_custom_op_NAME.

#include <dlfcn.h>
#include <sched.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "litert/cc/litert_common.h"
#include "litert/cc/litert_compiled_model.h"
#include "litert/cc/litert_environment.h"
#include "litert/cc/litert_options.h"
#include "litert/cc/litert_tensor_buffer.h"

namespace {

constexpr double kSlower = 1.2;

constexpr std::uint32_t kXnnpackFloat16 = 0xF;  // compute in float16 whatever the model says
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

// A processor as a line of plan.txt has it.
struct ProcessorLine {
  std::string kind, precision, kernels;
  bool both = false;
  int threads = 1;
  std::vector<int> cores, excludes;
};

// A stage file, and the tensors that it reads and writes, by number.
struct StageLine {
  std::string file;
  std::vector<int> inputs, outputs;
  double expected_ms = 0.0;
  std::vector<std::pair<std::string, int>> custom;  // names and versions of its custom operators
};

// A tensor, which may be rows of another one.
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

// An instance of a model: who asks when, and which processors may take which of its jobs.
struct ClientLine {
  std::string name;
  int model = 0, requests = 1, queue = 1;
  bool closed = false;
  std::int64_t priority = 0, deadline_ns = 0;
  std::vector<std::int64_t> releases_ns;
  std::vector<std::vector<int>> processors;  // of each job those that may take it
  std::vector<std::vector<int>> needs;  // of each job those that it waits for
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
  if (words.count("engine")) {  // LiteRT's C++ API compiles models, and these leave outputs as they were
    throw std::runtime_error(stage.file + " has state, or outputs that are constant or sized by data, which only run_plan.py can do");
  }
  std::stringstream custom(words.count("custom") ? words.at("custom") : "");
  for (std::string part; std::getline(custom, part, ',');) {
    const auto split = part.rfind(':');
    if (split == std::string::npos) throw std::runtime_error("plan.txt: " + part + " is no NAME:VERSION");
    stage.custom.emplace_back(part.substr(0, split), std::stoi(part.substr(split + 1)));
  }
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
  client.needs.resize(client.processors.size());  // the last ones may wait for none
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

// The tensors of an instance. One that is rows of another one lies in it.
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
    Bytes& data = data_.at(line.root < 0 ? number : line.root);
    return litert::Span<std::uint8_t>(data.data() + line.first, line.nbytes);
  }

 private:
  const std::map<int, TensorLine>* lines_;
  std::map<int, Bytes> data_;
};

void Pin(const std::vector<int>& cores) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int core : cores) CPU_SET(core, &set);
  if (!cores.empty()) sched_setaffinity(0, sizeof(set), &set);  // where a core is not ours, the system chooses
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

// A stage file, compiled for its processor; threads of its kernels are made on its cores.
class Stage {
 public:
  Stage(litert::Environment& environment, const std::string& folder, const StageLine& line,
        const ProcessorLine& processor)
      : line_(&line), processor_(&processor) {
    Pin(processor.cores);
    auto options = Must(litert::Options::Create(), "options");
    const auto accelerator = processor.kind == "gpu"   ? litert::HwAccelerators::kGpu
                             : processor.kind == "npu" ? litert::HwAccelerators::kNpu
                                                       : litert::HwAccelerators::kCpu;
    if (processor.both) {  // LiteRT places on the CPU what the accelerator does not take
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
        Must(cpu.SetXNNPackFlags(kXnnpackFloat16), "kernels");
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
    const std::string path = folder + "/" + line.file;
    model_.emplace(Must(litert::CompiledModel::Create(environment, path, options), path));
    into_ = Must(model_->CreateInputBuffers(), path);
    out_ = Must(model_->CreateOutputBuffers(), path);
    if (into_.size() != line.inputs.size() || out_.size() != line.outputs.size()) {
      throw std::runtime_error(path + " has other inputs or outputs than the plan says");
    }
  }

  const StageLine& line() const { return *line_; }
  const ProcessorLine& processor() const { return *processor_; }

  // Runs the stage on an instance's tensors, and returns the milliseconds that it took.
  double Run(Tensors& tensors) {
    const auto begin = std::chrono::steady_clock::now();
    for (std::size_t i = 0; i < into_.size(); ++i) {
      Must(into_[i].Write<std::uint8_t>(tensors.At(line_->inputs[i])), "input of " + line_->file);
    }
    Must(model_->Run(into_, out_), line_->file);
    for (std::size_t i = 0; i < out_.size(); ++i) {
      Must(out_[i].Read<std::uint8_t>(tensors.At(line_->outputs[i])), "output of " + line_->file);
    }
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  }

 private:
  const StageLine* line_;
  const ProcessorLine* processor_;
  std::optional<litert::CompiledModel> model_;
  std::vector<litert::TensorBuffer> into_, out_;
};

std::int64_t Now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// The law by which jobs queue for processors: that of scheduler.py.
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
    std::vector<std::int64_t> came_ns, ended_ns;  // of each request; -1 where it was turned away, 0 before it ended
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

  // Lets in who has come by now, and gives jobs to processors that are free.
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
  // Begins with a request: jobs that wait for no other are ready.
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

// Several models on their processors, each of them a thread.
class Models {
 public:
  Models(litert::Environment& environment, const PlanText& plan, std::vector<Tensors>& tensors)
      : plan_(plan), tensors_(tensors), scheduler_(plan), todo_(plan.processors.size()), made_(plan.processors.size()) {
    scheduler_.Begin(Now());
    for (std::size_t processor = 0; processor < plan.processors.size(); ++processor) {
      std::string problem;  // one after another: each makes the threads of its kernels on its own cores
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

  // Runs all requests once, and adds their milliseconds to those of the instances.
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
            place = std::make_unique<Stage>(environment, model.folder, model.stages.at(job),
                                            plan_.processors[processor]);
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

// Fills the inputs of instances, one after another, with what is in a file.
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

// Fills the inputs of each instance with what its model was measured with; they stay zeros where no file says that.
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
      const auto data = tensors[k].At(number);
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
    stages.push_back(std::make_unique<Stage>(environment, model.folder, model.stages[i], processor));
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
    if (expected > 0.0 && ms > kSlower * expected) std::cout << ": drifted";
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
  std::vector<Tensors> tensors;
  for (const ClientLine& client : plan.clients) tensors.emplace_back(plan.models.at(client.model));
  if (inputs.empty()) {
    ReadUsualInputs(plan, tensors);
  } else {
    ReadInputs(inputs, std::ifstream(inputs, std::ios::binary), plan, tensors, 0, tensors.size());
  }
  const bool warm = outputs.empty();  // outputs of a model with state are those of as many runs as were asked for
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
  try {
    const int runs = count > 2 ? std::max(1, std::atoi(words[2])) : 50;
    return Run(words[1], runs, count == 5 ? words[3] : "", count == 5 ? words[4] : "");
  } catch (const std::exception& error) {
    std::cerr << "run_plan: " << error.what() << "\n";
    return 1;
  }
}
