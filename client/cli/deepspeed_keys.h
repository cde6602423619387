// What becomes of each key of a DeepSpeed configuration: the rules of client/deepspeed_keys.json,
// which the Python package's shardd.initialize goes by.
#ifndef SHARDD_CLIENT_CLI_DEEPSPEED_KEYS_H_
#define SHARDD_CLIENT_CLI_DEEPSPEED_KEYS_H_

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace shardd::cli {

struct ExplainedKey {
  std::string key;               // dotted
  nlohmann::ordered_json value;  // as the file has it
  // "honoured", "always" (it holds, whatever the key says), "off" (it asks for nothing),
  // "refused", "unknown".
  std::string fate;
  std::string text;  // what it becomes; why not, and what instead
};

// In the order of the file. InvalidArgument: the text is no JSON object. `origin` names it in
// messages.
absl::StatusOr<std::vector<ExplainedKey>> ExplainDeepSpeed(const std::string& text,
                                                           const std::string& origin);

}  // namespace shardd::cli

#endif  // SHARDD_CLIENT_CLI_DEEPSPEED_KEYS_H_
