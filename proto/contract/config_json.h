// Configuration as text: JSON files and NAME=VALUE settings read into protobuf
// messages by reflection. Job and daemon configuration both go through here, so
// that a file, a flag and an environment variable accept the same things.
//
// Names are the .proto field names. A field has a dotted path; elements of a
// repeated field carry an index: groups[0].hyper.weight_decay.
#ifndef SHARDD_PROTO_CONTRACT_CONFIG_JSON_H_
#define SHARDD_PROTO_CONTRACT_CONFIG_JSON_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace google::protobuf {
class Descriptor;
class Message;
}  // namespace google::protobuf

namespace shardd::contract {

// Sets the fields of `message` that the JSON object in `text` names; others keep
// their values. A repeated field that is named is replaced as a whole; if it had
// elements, the first of them holds the defaults of each new one. Enums are given by
// name. `origin` (a file's path) begins every error. InvalidArgument:
//   text that is not JSON, with line and column;
//   an unknown key, with its dotted path and the nearest valid one;
//   a key given twice;
//   a value of another type or out of range, with path, what is expected, what is found.
// On an error `message` is unchanged.
absl::Status ParseJson(const std::string& text, const std::string& origin,
                       google::protobuf::Message* message);

// Sets one field that is not a message from text: numbers in decimal, booleans as
// true or false, enums by name, strings as they are. An index equal to the number
// of elements appends one. InvalidArgument as for ParseJson.
absl::Status SetField(google::protobuf::Message* message, const std::string& path,
                      const std::string& text);

// The value of one such field, in the form that SetField reads.
absl::StatusOr<std::string> GetField(const google::protobuf::Message& message,
                                     const std::string& path);

// Paths of all fields that are not messages, in order of declaration; repeated
// fields with the index 0.
std::vector<std::string> FieldPaths(const google::protobuf::Descriptor* descriptor);

// The valid path nearest to `path` by edit distance, the last name counting most;
// empty when none is near.
std::string NearestPath(const google::protobuf::Descriptor* descriptor, const std::string& path);

}  // namespace shardd::contract

#endif  // SHARDD_PROTO_CONTRACT_CONFIG_JSON_H_
