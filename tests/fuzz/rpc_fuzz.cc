// Random bytes as every RPC: the daemon answers each, and lives.
//
// The first byte chooses the method; a second whether the bytes are sent as they
// are or, if they parse, with a valid token and protocol version put in.
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <cstdlib>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "proto/control.pb.h"
#include "tests/fuzz/in_process_daemon.h"
#include "tests/support/raw_session.h"

namespace {

using google::protobuf::Message;

struct Method {
  std::string path;
  const google::protobuf::Descriptor* input;
};

std::vector<Method> AllMethods() {
  std::vector<Method> methods;
  const auto* file = shardd::v1::OpenRequest::descriptor()->file();
  for (int s = 0; s < file->service_count(); ++s) {
    const auto* service = file->service(s);
    for (int m = 0; m < service->method_count(); ++m) {
      methods.push_back({"/" + service->full_name() + "/" + service->method(m)->name(),
                         service->method(m)->input_type()});
    }
  }
  return methods;
}

// The message with a valid token (and version, where there is one); empty: does not parse.
std::string WithToken(const Method& method, const std::string& bytes, const std::string& token) {
  std::unique_ptr<Message> message(
      google::protobuf::MessageFactory::generated_factory()->GetPrototype(method.input)->New());
  if (!message->ParsePartialFromString(bytes)) return "";
  const auto* reflection = message->GetReflection();
  if (const auto* field = method.input->FindFieldByName("token")) {
    reflection->SetString(message.get(), field, token);
  }
  if (const auto* field = method.input->FindFieldByName("protocol_version")) {
    reflection->SetUInt32(message.get(), field, shardd::contract::kProtocolVersion);
  }
  return message->SerializeAsString();
}

// Whatever the answer is, one comes.
void Call(grpc::GenericStub* stub, const std::string& path, const std::string& bytes) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(15));
  const grpc::Slice slice(bytes);
  const grpc::ByteBuffer request(&slice, 1);
  grpc::ByteBuffer reply;
  std::promise<grpc::Status> done;
  stub->UnaryCall(&context, path, grpc::StubOptions(), &request, &reply,
                  [&](grpc::Status status) { done.set_value(std::move(status)); });
  if (done.get_future().get().error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) {
    std::fprintf(stderr, "%s was not answered\n", path.c_str());
    std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  auto& daemon = shardd::test::InProcessDaemon::Get();
  static const auto* methods = new std::vector<Method>(AllMethods());
  static auto* stub = new grpc::GenericStub(
      grpc::CreateChannel("unix:" + daemon.socket(), grpc::InsecureChannelCredentials()));
  static uint64_t run = 0;
  if (++run % 64 == 0) daemon.CheckBystander();
  if (size < 2) return 0;
  const Method& method = (*methods)[data[0] % methods->size()];
  const std::string bytes(reinterpret_cast<const char*>(data + 2), size - 2);
  if (data[1] % 4 == 0) {
    Call(stub, method.path, bytes);
    return 0;
  }
  // With a token it does what it says: nobody is let in any more.
  if (method.input == shardd::v1::DrainRequest::descriptor()) return 0;
  shardd::test::RawSession raw(daemon.socket());
  // Half of them from a session that is in a job and trains.
  const bool joined = data[1] % 4 != 1;
  if (joined) raw.Start("fuzz", 100, 0, 1);
  const std::string patched = WithToken(method, bytes, raw.token());
  Call(stub, method.path, patched);
  raw.DeleteAllJobsBut("bystander");
  return 0;
}
