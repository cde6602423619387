// What a file of exported weights holds and where: one safetensors file that Hugging Face's
// loaders read, with the names that the trainer registered.
#ifndef SHARDD_PROTO_CHECKPOINT_EXPORT_PLAN_H_
#define SHARDD_PROTO_CHECKPOINT_EXPORT_PLAN_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/control.pb.h"
#include "proto/safetensors/format.h"

namespace shardd::checkpoint {

struct ExportPlan {
  safetensors::DType dtype = safetensors::DType::kF32;
  std::string header;
  uint64_t bytes = 0;  // of the file
  // Where the values of each parameter go, in bytes from the start of the file: its own name's
  // place, then one for each other name. Tied parameters are written once for each name, since
  // safetensors lets no two tensors share bytes.
  std::vector<std::vector<uint64_t>> parameters;
  std::vector<std::vector<uint64_t>> frozen;

  uint64_t element_bytes() const { return safetensors::DTypeSize(dtype); }
};

// `parameters`: its `parameters` and `frozen` are read. `prefix` goes before each one's own name,
// not before its other names ("transformer.", for a model of which they are a part).
// InvalidArgument: a dtype other than fp32
// and bf16, or a name that is there twice.
absl::StatusOr<ExportPlan> PlanExport(const v1::OpenRequest& parameters, v1::DType dtype,
                                      const std::string& prefix,
                                      const std::map<std::string, std::string>& metadata);

// "fp32" or "bf16"; InvalidArgument for others.
absl::StatusOr<v1::DType> ParseExportDType(const std::string& text);

}  // namespace shardd::checkpoint

#endif  // SHARDD_PROTO_CHECKPOINT_EXPORT_PLAN_H_
