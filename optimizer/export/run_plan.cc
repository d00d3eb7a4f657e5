// Runs an exported plan with LiteRT's C++ API: every stage file on its processor, in the order of the plan.
//
//   run_plan FOLDER [RUNS]                     times the plan on zeros, and compares the stages with what the plan expects
//   run_plan FOLDER RUNS INPUTS OUTPUTS        on the bytes of all inputs in a file, one after another; the outputs' bytes
//                                              go to another one
//
// plan.txt in the folder is plan.json in words: one line a tensor, a stage. A stage that takes more than 1.2 times as
// long as expected has drifted. The plan always runs: only the runner in Python can fall back to the whole model.

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
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

using Tensors = std::map<int, std::vector<std::uint8_t>>;  // their bytes, by number

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

// A stage as a line of plan.txt has it.
struct StageLine {
  std::string file, kind, precision;
  bool both = false;
  int threads = 1;
  std::vector<int> cores, inputs, outputs;
  double expected_ms = 0.0;
};

struct PlanText {
  std::map<int, std::size_t> nbytes;  // of each tensor
  std::vector<int> inputs, outputs;
  std::vector<StageLine> stages;
};

std::vector<int> Numbers(const std::string& text) {
  std::vector<int> found;
  std::stringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) found.push_back(std::stoi(part));
  return found;
}

// Reads "key=value" words.
StageLine ReadStage(std::istream& words) {
  StageLine stage;
  for (std::string word; words >> word;) {
    const auto split = word.find('=');
    const std::string key = word.substr(0, split), value = word.substr(split + 1);
    if (key == "file") stage.file = value;
    if (key == "kind") stage.kind = value;
    if (key == "both") stage.both = value == "1";
    if (key == "precision") stage.precision = value;
    if (key == "threads") stage.threads = std::stoi(value);
    if (key == "cores") stage.cores = Numbers(value);
    if (key == "inputs") stage.inputs = Numbers(value);
    if (key == "outputs") stage.outputs = Numbers(value);
    if (key == "expected_ms") stage.expected_ms = std::stod(value);
  }
  return stage;
}

PlanText ReadPlan(const std::string& folder) {
  std::ifstream file(folder + "/plan.txt");
  if (!file) throw std::runtime_error(folder + "/plan.txt cannot be read");
  PlanText plan;
  for (std::string line; std::getline(file, line);) {
    std::stringstream words(line);
    std::string kind, rest;
    words >> kind;
    if (kind == "tensor") {
      int number = 0;
      std::size_t nbytes = 0;
      words >> number >> nbytes;
      plan.nbytes[number] = nbytes;
    } else if (kind == "inputs" || kind == "outputs") {
      words >> rest;
      (kind == "inputs" ? plan.inputs : plan.outputs) = Numbers(rest);
    } else if (kind == "stage") {
      plan.stages.push_back(ReadStage(words));
    }
  }
  return plan;
}

void Pin(const std::vector<int>& cores) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int core : cores) CPU_SET(core, &set);
  if (!cores.empty()) sched_setaffinity(0, sizeof(set), &set);  // where a core is not ours, the system chooses
}

// A stage file, compiled for its processor; threads of its kernels are made on its cores.
class Stage {
 public:
  Stage(litert::Environment& environment, const std::string& folder, StageLine line) : line_(std::move(line)) {
    Pin(line_.cores);
    auto options = Must(litert::Options::Create(), "options");
    const auto accelerator = line_.kind == "gpu"   ? litert::HwAccelerators::kGpu
                             : line_.kind == "npu" ? litert::HwAccelerators::kNpu
                                                   : litert::HwAccelerators::kCpu;
    if (line_.both) {  // LiteRT places on the CPU what the accelerator does not take
      Must(options.SetHardwareAccelerators(accelerator | litert::HwAccelerators::kCpu), "accelerators");
    } else {
      Must(options.SetHardwareAccelerators(accelerator), "accelerator");
    }
    if (line_.kind == "cpu") {
      Must(Must(options.GetCpuOptions(), "options of the CPU").SetNumThreads(line_.threads), "threads");
    } else if (line_.kind == "gpu" && line_.precision == "f32") {
      Must(Must(options.GetGpuOptions(), "options of the GPU").SetPrecision(litert::GpuOptions::Precision::kFp32),
           "precision");
    }
    model_.emplace(Must(litert::CompiledModel::Create(environment, folder + "/" + line_.file, options), line_.file));
    into_ = Must(model_->CreateInputBuffers(), line_.file);
    out_ = Must(model_->CreateOutputBuffers(), line_.file);
  }

  const StageLine& line() const { return line_; }

  // Runs the stage on tensors by number, and returns the milliseconds that it took.
  double Run(Tensors& tensors) {
    Pin(line_.cores);
    const auto begin = std::chrono::steady_clock::now();
    for (std::size_t i = 0; i < into_.size(); ++i) {
      const auto& data = tensors.at(line_.inputs[i]);
      Must(into_[i].Write<std::uint8_t>(litert::Span<const std::uint8_t>(data.data(), data.size())), "input of " + line_.file);
    }
    Must(model_->Run(into_, out_), line_.file);
    for (std::size_t i = 0; i < out_.size(); ++i) {
      auto& data = tensors.at(line_.outputs[i]);
      Must(out_[i].Read<std::uint8_t>(litert::Span<std::uint8_t>(data.data(), data.size())), "output of " + line_.file);
    }
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  }

 private:
  StageLine line_;
  std::optional<litert::CompiledModel> model_;
  std::vector<litert::TensorBuffer> into_, out_;
};

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// Fills tensors, one after another, with what is in a file.
void ReadInputs(const std::string& path, const std::vector<int>& numbers, Tensors& tensors) {
  std::ifstream file(path, std::ios::binary);
  for (const int number : numbers) {
    auto& data = tensors.at(number);
    file.read(reinterpret_cast<char*>(data.data()), static_cast<std::streamsize>(data.size()));
  }
  if (!file || file.peek() != std::ifstream::traits_type::eof()) {
    throw std::runtime_error(path + " does not hold as many bytes as the inputs");
  }
}

void WriteOutputs(const std::string& path, const std::vector<int>& numbers, const Tensors& tensors) {
  std::ofstream file(path, std::ios::binary);
  for (const int number : numbers) {
    const auto& data = tensors.at(number);
    file.write(reinterpret_cast<const char*>(data.data()), static_cast<std::streamsize>(data.size()));
  }
  if (!file.flush()) throw std::runtime_error(path + " cannot be written");
}

int Run(const std::string& folder, int runs, const std::string& inputs, const std::string& outputs) {
  const PlanText plan = ReadPlan(folder);
  auto environment = Must(litert::Environment::Create({}), "LiteRT");
  std::vector<Stage> stages;
  for (const StageLine& line : plan.stages) stages.emplace_back(environment, folder, line);
  Tensors tensors;
  for (const auto& [number, nbytes] : plan.nbytes) tensors[number].assign(nbytes, 0);
  if (!inputs.empty()) ReadInputs(inputs, plan.inputs, tensors);

  std::vector<std::vector<double>> took(stages.size());
  std::vector<double> totals;
  for (int run = -3; run < runs; ++run) {
    double total = 0.0;
    for (std::size_t i = 0; i < stages.size(); ++i) {
      const double ms = stages[i].Run(tensors);
      total += ms;
      if (run >= 0) took[i].push_back(ms);
    }
    if (run >= 0) totals.push_back(total);
  }
  if (!outputs.empty()) WriteOutputs(outputs, plan.outputs, tensors);
  std::cout << Median(totals) << " ms an inference\n";
  for (std::size_t i = 0; i < stages.size(); ++i) {
    const double ms = Median(took[i]), expected = stages[i].line().expected_ms;
    std::cout << "stage " << i << " " << stages[i].line().kind << ": " << ms << " ms";
    if (expected > 0.0) std::cout << ", " << ms / expected << " times as long as expected";
    if (expected > 0.0 && ms > kSlower * expected) std::cout << ": drifted";
    std::cout << "\n";
  }
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
