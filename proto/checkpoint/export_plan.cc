#include "proto/checkpoint/export_plan.h"

#include <set>

#include "absl/strings/str_cat.h"

namespace shardd::checkpoint {

namespace {

// Adds tensors to a header, one after the other.
class Header {
 public:
  Header(safetensors::DType dtype, std::string prefix)
      : dtype_(dtype), prefix_(std::move(prefix)) {}

  // The place of each name relative to the first tensor.
  template <typename Parameter>
  absl::StatusOr<std::vector<uint64_t>> Add(const Parameter& parameter) {
    std::vector<uint64_t> places;
    std::vector<std::string> names = {prefix_ + parameter.name()};
    names.insert(names.end(), parameter.aliases().begin(), parameter.aliases().end());
    for (const std::string& name : names) {
      if (!names_.insert(name).second) {
        return absl::InvalidArgumentError(absl::StrCat(
            "two parameters are called '", name, "'; register them under names of their own"));
      }
      safetensors::TensorInfo tensor;
      tensor.name = name;
      tensor.dtype = dtype_;
      tensor.shape.assign(parameter.shape().begin(), parameter.shape().end());
      uint64_t bytes = 0;
      absl::Status status = safetensors::ShapeBytes(name, tensor.shape, dtype_, &bytes);
      if (!status.ok()) return status;
      tensor.begin = end_;
      tensor.end = end_ += bytes;
      places.push_back(tensor.begin);
      tensors_.push_back(std::move(tensor));
    }
    return places;
  }
  const std::vector<safetensors::TensorInfo>& tensors() const { return tensors_; }
  uint64_t data_bytes() const { return end_; }

 private:
  const safetensors::DType dtype_;
  const std::string prefix_;
  uint64_t end_ = 0;
  std::set<std::string> names_;
  std::vector<safetensors::TensorInfo> tensors_;
};

}  // namespace

absl::StatusOr<v1::DType> ParseExportDType(const std::string& text) {
  if (text == "fp32") return v1::fp32;
  if (text == "bf16") return v1::bf16;
  return absl::InvalidArgumentError(
      absl::StrCat("weights are exported as fp32 or bf16, not as '", text, "'"));
}

absl::StatusOr<ExportPlan> PlanExport(const v1::OpenRequest& parameters, v1::DType dtype,
                                      const std::string& prefix,
                                      const std::map<std::string, std::string>& metadata) {
  if (dtype != v1::fp32 && dtype != v1::bf16) {
    return ParseExportDType(v1::DType_Name(dtype)).status();
  }
  ExportPlan plan;
  plan.dtype = dtype == v1::fp32 ? safetensors::DType::kF32 : safetensors::DType::kBF16;
  Header header(plan.dtype, prefix);
  for (const v1::Parameter& parameter : parameters.parameters()) {
    absl::StatusOr<std::vector<uint64_t>> places = header.Add(parameter);
    if (!places.ok()) return places.status();
    plan.parameters.push_back(*std::move(places));
  }
  for (const v1::FrozenParameter& parameter : parameters.frozen()) {
    absl::StatusOr<std::vector<uint64_t>> places = header.Add(parameter);
    if (!places.ok()) return places.status();
    plan.frozen.push_back(*std::move(places));
  }
  absl::StatusOr<std::string> text =
      safetensors::EncodeHeader("the exported file", metadata, header.tensors(), 64);
  if (!text.ok()) return text.status();
  plan.header = *std::move(text);
  for (auto* places : {&plan.parameters, &plan.frozen}) {
    for (std::vector<uint64_t>& of_one : *places) {
      for (uint64_t& place : of_one) place += plan.header.size();
    }
  }
  plan.bytes = plan.header.size() + header.data_bytes();
  return plan;
}

}  // namespace shardd::checkpoint
