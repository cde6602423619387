// Writes a job's fp32 master weights to a file.
#ifndef SHARDD_TRAINER_EXPORT_MASTER_H_
#define SHARDD_TRAINER_EXPORT_MASTER_H_

#include <map>
#include <string>

#include "absl/status/status.h"
#include "client/client.h"
#include "trainer/models/model.h"

namespace shardd::trainer {

// All parameters in registration order, as F32 safetensors under their own names
// (aliases are not repeated), with `metadata`. Streams: a few MiB of memory however
// large the model. Durable when it returns OK; `path` is not touched otherwise.
absl::Status ExportMaster(Session* session, const models::Model& model,
                          const std::map<std::string, std::string>& metadata,
                          const std::string& path);

}  // namespace shardd::trainer

#endif  // SHARDD_TRAINER_EXPORT_MASTER_H_
