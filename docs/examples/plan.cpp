// Request a plan and act on each step as soon as it is whole.
//
//   g++ -std=c++17 plan.cpp -lzmq -o plan        (Debian: libzmq3-dev cppzmq-dev nlohmann-json3-dev)
//   ./plan tcp://127.0.0.1:5571 "Bring the cup to the table."
#include <chrono>
#include <exception>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <zmq.hpp>
#include <zmq_addon.hpp>

using nlohmann::json;

// Print steps as they come, then how the plan ended. Returns 0 for a whole and valid plan.
int plan(const std::string& endpoint, const std::string& prompt) {
  zmq::context_t context;
  zmq::socket_t socket(context, zmq::socket_type::dealer);
  socket.set(zmq::sockopt::linger, 0);  // a robot that stops must not wait for its socket
  socket.set(zmq::sockopt::rcvtimeo, 12000);
  socket.connect(endpoint);

  // An id that was never used before: no late reply can then be taken for this one's.
  const auto now = std::chrono::system_clock::now().time_since_epoch().count();
  const std::string id = "cpp-" + std::to_string(now);
  const json request = {{"v", 1},           {"op", "plan"},      {"id", id},
                        {"prompt", prompt}, {"stream", "steps"}, {"deadline_ms", 10000}};
  socket.send(zmq::message_t(), zmq::send_flags::sndmore);  // a DEALER writes its own empty frame
  socket.send(zmq::buffer(request.dump()), zmq::send_flags::none);

  for (;;) {
    zmq::multipart_t message;
    if (!message.recv(socket)) {
      std::cerr << "no reply\n";
      return 1;
    }
    json reply = json::parse(message.back().to_string());
    if (reply["id"] != id) continue;
    if (reply["type"] == "chunk") {
      std::cout << "step " << reply["step"]["skill"] << " " << reply["step"]["args"] << std::endl;
    } else if (reply["type"] == "result" && reply["status"] == "ok" && reply["plan_valid"] == true) {
      std::cout << "done " << reply["usage"]["output_tokens"] << " tokens" << std::endl;
      return 0;
    } else if (reply["type"] == "result") {  // cut short, wrong, or a text without a plan
      std::cout << "failed " << reply["status"] << " " << reply["finish_reason"] << std::endl;
      return 1;
    } else {
      std::cout << "refused " << reply["code"] << " " << reply["message"] << std::endl;
      return 1;
    }
  }
}

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: plan ENDPOINT TEXT\n";
    return 2;
  }
  try {
    return plan(argv[1], argv[2]);
  } catch (const std::exception& error) {  // a malformed endpoint, a text that is not UTF-8
    std::cerr << "plan: " << argv[1] << ": " << error.what() << "\n";
    return 2;
  }
}
